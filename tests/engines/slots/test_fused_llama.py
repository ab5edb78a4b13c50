import asyncio
from typing import Any

import pytest
import torch

from support.acting import Parrot, served, tiny_model
from turnwise.engines.base import Sampling
from turnwise.engines.slots import fused_llama as module
from turnwise.engines.slots.fused_llama import attend_causally, try_fuse
from turnwise.engines.slots.model import SlotModel
from turnwise.engines.slots.request import Request
from turnwise.learn.attention import NAME, register

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def model_of(name, **settings):
    from transformers import AutoConfig, AutoModelForCausalLM

    register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SMALL, **settings}))
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)  # biases are zero and norms are one at first
    model.set_attn_implementation(NAME)
    return model.eval()


def states_of(model, tokens, positions):
    states = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False}
    return model.base_model(**states, attend=attend_causally).last_hidden_state[0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": None}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    ],
)
def test_it_computes_what_the_model_does(name, settings):
    model = model_of(name, **settings)
    with torch.inference_mode():
        fused: Any = try_fuse(model, 64)
        tokens, positions = torch.randint(0, 61, (2, 9))
        torch.testing.assert_close(
            fused(tokens, positions, attend_causally), states_of(model, tokens, positions), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma", {}),  # norms that add one to their weights
        ("granite", {"residual_multiplier": 0.5}),
        ("olmo2", {}),  # norms elsewhere
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),  # a layer without positions
        ("llama", {"hidden_act": "gelu"}),
        ("gpt2", {"n_layer": 2}),
        ("phi3", {}),  # projections in one
    ],
)
def test_other_models_compute_themselves(name, settings):
    with torch.inference_mode():
        assert try_fuse(model_of(name, **settings), 64) is None


def test_a_layer_with_more_to_it_computes_itself():
    model = model_of("llama")
    model.base_model.layers[2].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with torch.inference_mode():
        assert try_fuse(model, 64) is None
        assert try_fuse(Parrot([0], 4), 64) is None


def test_it_has_no_weights_besides_the_models():
    model, other = served(tiny_model(seed=0)), served(tiny_model(seed=1))
    with torch.inference_mode():
        fused: Any = try_fuse(model, 64)
    model.load_state_dict(other.state_dict())
    with torch.inference_mode():
        tokens, positions = torch.randint(0, 61, (2, 9))
        torch.testing.assert_close(
            fused(tokens, positions, attend_causally), states_of(other, tokens, positions), atol=1e-5, rtol=1e-5
        )


# ---------------------------------------------------------------- positions far away

FAR = 128
"""Where the models below begin to compute something else."""


def ministral():
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 2.0}
    return model_of(
        "ministral3", rope_parameters={**rope, "original_max_position_embeddings": FAR}, sliding_window=None
    )


def far_sighted():
    """A llama whose later queries are others, by an attribute and a class that nobody has heard of."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    class FarSighted(LlamaAttention):
        def forward(self, hidden_states, position_embeddings, *args, position_ids=None, **others):
            cos, sin = position_embeddings
            scale = torch.where(position_ids >= FAR, self.zeal, 1.0)[..., None].to(cos.dtype)
            return super().forward(hidden_states, (cos * scale, sin * scale), *args, **others)

    model = model_of("llama")
    for layer in model.base_model.layers:
        layer.self_attn.__class__ = FarSighted
        layer.self_attn.zeal = 2.0
    return model


MODELS = {"ministral3": ministral, "far-sighted": far_sighted}


def sampled_logprobs(model, prompt):
    """(tokens, logprobs) that the slot engine samples after a prompt."""
    slots = SlotModel(model, slots=1, context=2 * FAR, end_tokens=[], decode=str, dtype=torch.float32)
    loop = asyncio.new_event_loop()
    slots.submit(Request(prompt.astype("int32"), Sampling(6), "s", 0, loop.create_future()))
    done = []
    while slots.busy:
        done += slots.step()
    loop.close()
    [(_, completion)] = done
    return completion.tokens, torch.from_numpy(completion.logprobs.copy())


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_is_right_where_a_model_changes_far_into_the_context(name):
    model = MODELS[name]()
    prompt = torch.randint(0, 61, (FAR + 40,), generator=torch.Generator().manual_seed(0)).numpy()
    tokens, found = sampled_logprobs(model, prompt)
    rows = torch.cat([torch.from_numpy(prompt), torch.from_numpy(tokens.copy()).long()])
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logprobs = model(input_ids=rows[None], use_cache=False).logits[0].log_softmax(-1)
    wanted = logprobs[len(prompt) - 1 : -1].gather(1, rows[len(prompt) :, None])[:, 0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_unknown_layers_and_those_that_differ_at_late_positions_use_transformers(name, monkeypatch):
    model = MODELS[name]()
    with torch.inference_mode():
        assert try_fuse(model, FAR) is None
        monkeypatch.setattr(module, "is_known", lambda base: True)
        assert try_fuse(model, FAR) is not None  # it is the same so far
        assert try_fuse(model, 2 * FAR) is None


@pytest.mark.parametrize("what", ["attribute", "field", "rope", "class"])
def test_anything_unknown_is_reason_enough(what, monkeypatch):
    model = model_of("llama")
    base = model.base_model
    assert module.is_known(base)
    if what == "attribute":
        base.layers[1].self_attn.zeal = 1.0
    elif what == "field":
        monkeypatch.setattr(module, "FIELDS", module.FIELDS - {"mlp_bias"})  # as if it were a new one
    elif what == "rope":
        base.config.rope_parameters["zeal"] = 1.0
    else:
        base.norm = torch.nn.RMSNorm(32)
    assert not module.is_known(base)
