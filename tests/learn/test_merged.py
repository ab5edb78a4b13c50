"""Adapters of layers that hold their weights in other ways: experts in one tensor, and turned round."""

import copy

import numpy as np
import pytest
import torch

from learn.test_learner import CLIP, TURNS, batch
from learn.test_lora import SETTINGS, assert_continues, logprobs, lora_learner
from support.acting import byte_tokenizer, inline, run
from support.making import VOCABULARY, make_model
from turnwise.engines.base import Sampling
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.slots.model import SlotModel
from turnwise.learn.learner import save_policy
from turnwise.learn.lora import Adapters, LoraSettings
from turnwise.learn.policy import load_model
from turnwise.messages import Message
from turnwise.plan.pack import pack
from turnwise.types import Turn

pytest.importorskip("peft")

EXPERTS = {"num_experts_per_tok": 2, "intermediate_size": 24, "moe_intermediate_size": 24}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
KINDS = {
    "qwen3_moe": {**SMALL, **EXPERTS, "num_experts": 4},
    "mixtral": {**SMALL, **EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "olmoe": {**SMALL, **EXPERTS, "num_experts": 4},
    "glm4_moe": {**SMALL, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
}
TARGETS = [
    *((kind, ()) for kind in KINDS),
    ("gpt2", ("attn.c_proj",)),  # a square weight: turned round it fits too
    ("qwen3_moe", ("q_proj", "v_proj")),
    ("mixtral", ("w1", "w3")),
    ("glm4_moe", ("gate",)),
]


def model_of(kind, vocabulary=VOCABULARY):
    """A tiny model of an architecture, every parameter of it random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = {"vocab_size": vocabulary, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind], **tokens))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def moved(kind, targets=(), count=3):
    """(the model that training started from, a learner after some updates)."""
    start = model_of(kind)
    learner = lora_learner(copy.deepcopy(start), LoraSettings(SETTINGS.rank, SETTINGS.alpha, targets))
    learner.adapters.check()
    for _ in range(count):
        learner.update(*batch(), CLIP)
    return start, learner


def engine_of(model, **how):
    slots = SlotModel(model, slots=8, context=64, end_tokens=(), decode=str, dtype=torch.float32)
    return SlotEngine(slots, run=inline, **how)


async def sampled(engine):
    """Turns that an engine samples after random prompts."""
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (4, 9)).astype(np.int32)
    turns = []
    for number, prompt in enumerate(prompts):
        said = await engine.generate(prompt, Sampling(8, 1.0), session=str(number), seed=number)
        turns.append(Turn(prompt, said.tokens, said.logprobs, said.versions, said.stop, 0.0, Message("assistant", "")))
    return turns


@pytest.mark.parametrize(("kind", "targets"), TARGETS)
def test_the_published_weights_are_a_plain_model_that_says_the_same(kind, targets):
    start, learner = moved(kind, targets)
    plain = copy.deepcopy(start)
    weights = learner.publish()
    assert {name: tensor.shape for name, tensor in weights.items()} == learner.adapters.plain
    plain.load_state_dict(dict(weights))
    own = np.concatenate(learner.score(batch()[0], len(TURNS)))
    np.testing.assert_allclose(logprobs(plain), own, atol=1e-5)
    assert np.abs(own - logprobs(start)).max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_engines_say_what_the_learner_does_with_its_module_and_with_a_copy(kind):
    start, learner = moved(kind, count=0)
    copied = copy.deepcopy(start)
    copied.set_attn_implementation("turnwise")
    shared, apart = engine_of(learner.policy.model, shares_weights=True), engine_of(copied, shares_weights=False)

    async def scene():
        for version in (1, 2):
            learner.update(*batch(), CLIP)
            await shared.load({}, version)
            await apart.load(learner.publish(), version)
            turns = [*await sampled(shared), *await sampled(apart)]
            own = learner.score(pack(turns, 1000), len(turns))
            for turn, logprob in zip(turns, own, strict=True):
                assert set(turn.versions) == {version}
                np.testing.assert_allclose(turn.logprobs, logprob, atol=1e-5)

    run(scene())


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_the_published_model_and_goes_on(tmp_path, kind):
    start, learner = moved(kind)
    save_policy(start, byte_tokenizer(), tmp_path / "base")
    learner.save(tmp_path / "step", byte_tokenizer())
    loaded, published = load_model(tmp_path / "step"), learner.publish()
    assert loaded.state_dict().keys() == published.keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in loaded.state_dict().items())
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert_continues(learner, tmp_path)


def test_a_loaded_checkpoint_takes_new_adapters(tmp_path):
    start, learner = moved("gpt2")
    save_policy(start, byte_tokenizer(), tmp_path / "base")
    learner.save(tmp_path / "step", byte_tokenizer())
    again = lora_learner(load_model(tmp_path / "step"))
    again.adapters.check()
    assert set(again.publish()) == set(start.state_dict())


@pytest.mark.parametrize("kind", ["qwen3", *KINDS])
def test_a_check_leaves_every_bit_as_it_was(kind):
    model = make_model() if kind == "qwen3" else model_of(kind)
    learner = lora_learner(model)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    learner.adapters.check()
    after = model.state_dict()
    assert before.keys() == after.keys()
    for name, (place, tensor) in before.items():
        assert after[name].data_ptr() == place
        assert torch.equal(after[name].view(torch.int32), tensor.view(torch.int32)), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer._disable_adapters for layer in learner.adapters.layers)


def test_a_sum_that_is_not_what_the_model_computes_is_refused():
    learner = lora_learner(model_of("gpt2"), LoraSettings(4, 8.0, ("attn.c_proj",)))
    learner.adapters.layers[-1].fan_in_fan_out = False  # as if the weight were not turned round
    with pytest.raises(ValueError, match=r"^lora.targets: the model with adapters and the one .* differ by .* choose"):
        learner.adapters.check()


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_that_would_never_train_is_refused(tied):
    learner = lora_learner(make_model("qwen3", tie_word_embeddings=tied), LoraSettings(4, 8.0, ("lm_head", "q_proj")))
    with pytest.raises(ValueError, match=r"^lora.targets: an adapter of lm_head would never get a gradient; leave it"):
        learner.adapters.check()


def test_a_layer_that_is_not_a_product_is_refused():
    with pytest.raises(ValueError, match=r"^lora.targets: an adapter of embed_tokens \(Embedding\) cannot be added"):
        Adapters(make_model(), LoraSettings(4, 8.0, ("embed_tokens",)), base="", seed=0)


def test_adapters_are_read_of_the_one_file_that_holds_no_code(tmp_path):
    start, learner = moved("gpt2", count=0)
    save_policy(start, byte_tokenizer(), tmp_path / "base")
    learner.save(tmp_path / "step", byte_tokenizer())
    kept = tmp_path / "step" / "adapter_model.safetensors"
    kept.rename(kept.with_suffix(".bin"))
    with pytest.raises(ValueError, match=r"has no adapter_model.safetensors; restore it from a copy$"):
        load_model(tmp_path / "step")
