"""The output layer of an engine."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise.engines.slots.head import head_of

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


def model_with_head(*, bias: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=97, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.lm_head = nn.Linear(24, 97, bias=bias)
    return model


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_those_of_the_module(rows: int, bias: bool) -> None:
    model = model_with_head(bias=bias)
    hidden = torch.randn(rows, 24)
    found = head_of(model, torch.float32)(hidden)
    wanted = torch.nn.functional.linear(
        hidden.double(), model.lm_head.weight.double(), None if not bias else model.lm_head.bias.double()
    )
    assert found.shape == (rows, 97)
    assert (found - wanted).abs().max() < 1e-5


def test_it_is_of_the_weights_it_was_made_from() -> None:
    model = model_with_head()
    hidden = torch.randn(3, 24)
    old = head_of(model, torch.float32)
    before = old(hidden)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(old(hidden), before)
    assert torch.allclose(head_of(model, torch.float32)(hidden), 2 * before)


def test_a_module_that_is_no_plain_layer_computes_itself() -> None:
    class Scaled(nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(states)

    model = model_with_head()
    model.lm_head = Scaled(24, 97, bias=False)
    assert head_of(model, torch.float32) is model.lm_head


def test_a_hooked_module_computes_itself() -> None:
    model = model_with_head()
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + 1)
    assert head_of(model, torch.float32) is model.lm_head


def test_bfloat16_is_left_to_the_module() -> None:
    model = model_with_head()
    assert head_of(model, torch.bfloat16) is model.lm_head
