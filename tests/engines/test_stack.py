import pytest
import torch

from acting import Parrot, served, tiny_model
from turnwise.engines.stack import causally, stack_of
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
    return model.base_model(**states, attend=causally).last_hidden_state[0]


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
        stack = stack_of(model)
        tokens, positions = torch.randint(0, 61, (2, 9))
        torch.testing.assert_close(
            stack(tokens, positions, causally), states_of(model, tokens, positions), atol=1e-5, rtol=1e-5
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
        assert stack_of(model_of(name, **settings)) is None


def test_a_layer_with_more_to_it_computes_itself():
    model = model_of("llama")
    model.base_model.layers[2].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with torch.inference_mode():
        assert stack_of(model) is None
        assert stack_of(Parrot([0], 4)) is None


def test_it_has_no_weights_of_its_own():
    model, other = served(tiny_model(seed=0)), served(tiny_model(seed=1))
    with torch.inference_mode():
        stack = stack_of(model)
    model.load_state_dict(other.state_dict())
    with torch.inference_mode():
        tokens, positions = torch.randint(0, 61, (2, 9))
        torch.testing.assert_close(
            stack(tokens, positions, causally), states_of(other, tokens, positions), atol=1e-5, rtol=1e-5
        )
