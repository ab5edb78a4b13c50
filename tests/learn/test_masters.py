"""The weights that are trained, where the files that others read have them rounded."""

import pytest
import torch
import transformers

from support.acting import byte_tokenizer
from support.making import make_learner, make_model
from turnwise.learn.masters import MASTERS, read_masters
from turnwise.learn.policy import load_model


@pytest.fixture
def saved(tmp_path):
    """(a learner that computes in bfloat16, its folder)."""
    learner = make_learner(make_model(), dtype=torch.bfloat16)
    learner.save(tmp_path, byte_tokenizer())
    return learner, tmp_path


def test_others_read_rounded_weights_and_turnwise_reads_those_that_are_trained(saved):
    learner, folder = saved
    trained = learner.policy.model.state_dict()
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(stock[name], tensor.bfloat16()) for name, tensor in trained.items())
    loaded = load_model(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())
    assert not all(torch.equal(stock[name].float(), tensor) for name, tensor in trained.items())


def test_a_restored_learner_has_them_whatever_it_was_made_with(saved):
    learner, folder = saved
    other = make_learner(make_model(seed=1), dtype=torch.bfloat16)
    other.restore(folder)
    trained = learner.policy.model.state_dict()
    assert all(torch.equal(trained[name], tensor) for name, tensor in other.policy.model.state_dict().items())


def test_a_learner_in_float32_keeps_its_weights_once(tmp_path):
    make_learner(make_model()).save(tmp_path, byte_tokenizer())
    assert not (tmp_path / MASTERS).exists()


def test_a_checkpoint_of_bfloat16_without_them_has_exact_files(tmp_path):
    """As earlier versions wrote it."""
    learner = make_learner(make_model())
    learner.save(tmp_path, byte_tokenizer())
    other = make_learner(load_model(tmp_path), dtype=torch.bfloat16)
    other.restore(tmp_path)
    assert all(
        torch.equal(learner.policy.model.state_dict()[name], tensor)
        for name, tensor in other.policy.model.state_dict().items()
    )


def test_those_of_another_model_are_refused_in_one_line(saved):
    with pytest.raises(ValueError, match="of another model: only one of them has model.layers.1") as refused:
        read_masters(saved[1], make_model(num_hidden_layers=1))
    assert "\n" not in str(refused.value)
    next((saved[1] / MASTERS).glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="master_weights is not whole"):
        load_model(saved[1])
