import copy

import numpy as np
import pytest
import torch

from learn.test_learner import CLIP, TURNS, batch
from support.acting import byte_tokenizer
from support.making import distance, gradients, make_model
from turnwise.learn.learner import Learner, save_policy
from turnwise.learn.lora import Adapters, LoraSettings, WithoutAdapters, base_of
from turnwise.learn.policy import Policy, load_model
from turnwise.learn.stepper import OptimizerSettings

pytest.importorskip("peft")
SETTINGS = LoraSettings(rank=4, alpha=8.0)


def lora_learner(model, settings=SETTINGS, base="../base", **how):
    adapters = Adapters(model, settings, base=base, seed=0)
    policy = Policy(model, **how)
    reference = {"reference": WithoutAdapters(policy, adapters)}
    rule = OptimizerSettings(1e-2, clip_norm=1e9)
    return Learner(policy, rule, lambda update: 1.0, reference, adapters=adapters)


def moved(kind="qwen3", count=3, **how):
    """(the model that training started from, a learner after some updates)."""
    start = make_model(kind)
    learner = lora_learner(copy.deepcopy(start), **how)
    for _ in range(count):
        learner.update(*batch(), CLIP)
    return start, learner


def assert_continues(learner, folder):
    """A learner restored from folder/step on the model of folder/base makes the same next update."""
    restored = lora_learner(load_model(folder / "base"))
    restored.restore(folder / "step")
    for each in (learner, restored):
        each.update(*batch(), CLIP)
    for name, parameter in learner.adapters.parameters.items():
        assert torch.equal(parameter, restored.adapters.parameters[name])


def logprobs(model):
    return np.concatenate(
        Learner(Policy(model), OptimizerSettings(0.0), lambda update: 1.0).score(batch()[0], len(TURNS))
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_the_published_weights_are_a_plain_model_that_says_the_same(kind):
    start, learner = moved(kind)
    plain = copy.deepcopy(start)
    weights = learner.publish()
    assert set(weights) == set(plain.state_dict())
    assert len(weights) == len(plain.state_dict())
    plain.load_state_dict(dict(weights))
    own = np.concatenate(learner.score(batch()[0], len(TURNS)))
    np.testing.assert_allclose(logprobs(plain), own, atol=1e-5)
    assert np.abs(own - logprobs(start)).max() > 0.05


def test_only_the_adapters_move():
    start, learner = moved()
    before = start.state_dict()
    after = {n.replace(".base_layer", ""): t for n, t in learner.policy.model.state_dict().items() if "lora_" not in n}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {name for name, _ in learner.stepper.named.items()} == set(learner.adapters.parameters)


def test_the_reference_is_the_model_without_its_adapters():
    start, learner = moved()
    plans = batch()[0]
    found = np.concatenate(learner.score(plans, len(TURNS), "reference"))
    np.testing.assert_allclose(found, logprobs(start), atol=1e-6)
    learner.update(*batch(), CLIP)
    assert all(p.grad is not None for p in learner.adapters.parameters.values())


def test_the_gradient_is_that_of_the_weights_they_are_added_to():
    """dL/dB = scale * dL/dW A^T: against a plain model with the same weights."""
    start, learner = moved(count=1)
    plain = copy.deepcopy(start)
    plain.load_state_dict(dict(learner.publish()))
    other = Learner(Policy(plain), OptimizerSettings(0.0, clip_norm=1e9), lambda update: 1.0)
    for one in (learner, other):
        plans, credit, weights, scores = batch()
        one.update(plans, credit, weights, scores, CLIP)
    mine, theirs = gradients(learner.policy.model), gradients(plain)
    name = "model.layers.1.mlp.down_proj"
    before = dict(moved(count=1)[1].policy.model.named_parameters())[f"{name}.lora_A.policy.weight"]
    wanted = SETTINGS.alpha / SETTINGS.rank * theirs[f"{name}.weight"] @ before.detach().double().numpy().T
    assert distance(mine[f"{name}.lora_B.policy.weight"], wanted) < 1e-4


def test_chosen_layers_only_and_a_wrong_name_is_refused():
    _, learner = moved(settings=LoraSettings(2, 4.0, ("q_proj", "v_proj")), count=0)
    assert {name.split(".")[-4] for name in learner.adapters.parameters} == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match=r"lora.targets: .*; this model's linear layers are .*down_proj"):
        Adapters(make_model(), LoraSettings(2, 4.0, ("nonsense",)), base="", seed=0)


def test_a_checkpoint_holds_adapters_and_loads_as_a_whole_model(tmp_path):
    start, learner = moved()
    save_policy(start, byte_tokenizer(), tmp_path / "base")
    learner.save(tmp_path / "step", byte_tokenizer())
    assert not (tmp_path / "step" / "model.safetensors").exists()
    assert base_of(tmp_path / "step").resolve() == tmp_path / "base"
    assert base_of(tmp_path / "base") is None
    own = np.concatenate(learner.score(batch()[0], len(TURNS)))
    np.testing.assert_allclose(logprobs(load_model(tmp_path / "step")), own, atol=1e-5)

    assert_continues(learner, tmp_path)


def test_peft_reads_what_is_saved(tmp_path):
    from peft import PeftModel

    start, learner = moved()
    learner.save(tmp_path, byte_tokenizer())
    theirs = PeftModel.from_pretrained(copy.deepcopy(start), tmp_path).eval()
    tokens = torch.arange(10)[None]
    learner.policy.model.set_attn_implementation("sdpa")
    wanted = learner.policy.model(input_ids=tokens).logits
    torch.testing.assert_close(theirs(input_ids=tokens).logits, wanted, atol=1e-5, rtol=1e-5)


def test_recomputed_layers_train_adapters_too():
    _, plain = moved(count=1)
    _, recomputed = moved(count=1, checkpointing=True)
    for name, parameter in plain.adapters.parameters.items():
        assert torch.equal(parameter, recomputed.adapters.parameters[name])
