"""Bytes that the output layer of Qwen3-8B reads and writes in a pass, beside those of its layers: on fake tensors."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise.learn import head
from turnwise.learn.attention import NAME, register
from turnwise.learn.head import token_logprobs

NUM_LAYERS, WIDTH, VOCABULARY = 36, 4096, 151_936
"""Of Qwen3-8B."""
TOKENS, ACTIONS = 16_384, 8_192


class Moved(TorchDispatchMode):
    """Counts the bytes of all arguments and results of kernels, and remembers which dtypes were cast to which."""

    def __init__(self):
        super().__init__()
        self.bytes = 0
        self.casts = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = [x for x in args if isinstance(x, torch.Tensor)]
        made = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor)]
        if function.namespace == "aten" and not function.is_view and "empty" not in str(function):
            self.bytes += sum(x.numel() * x.element_size() for x in [*given, *made])
        if "_to_copy" in str(function):
            self.casts.append((given[0].dtype, made[0].dtype, tuple(given[0].shape)))
        return result


class Flash(torch.autograd.Function):
    """What a flash kernel reads and writes."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return torch.empty_like(query).transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


@functools.cache
def bytes_of_layers(count):
    """Bytes of a forward and a backward pass through so many layers, without recomputation."""
    sizes = {"intermediate_size": 12_288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(vocab_size=64, hidden_size=WIDTH, num_hidden_layers=count, **sizes)
    register()
    with FakeTensorMode():
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.set_attn_implementation(NAME)
        attend = lambda layer, query, key, value, scaling: Flash.apply(query, key, value)
        tokens = torch.zeros(1, TOKENS, dtype=torch.long)
        with Moved() as moved:
            model.base_model(input_ids=tokens, use_cache=False, attend=attend).last_hidden_state.sum().backward()
    return moved.bytes


def moved_by_head(weight_dtype, with_entropy=False):
    with FakeTensorMode():
        hidden = torch.empty(ACTIONS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(VOCABULARY, WIDTH, dtype=weight_dtype, requires_grad=True)
        with Moved() as moved:
            logprobs, entropies = token_logprobs(hidden, weight, torch.zeros(ACTIONS, dtype=torch.long), 1.0)
            (logprobs.sum() + (entropies.sum() if with_entropy else 0.0)).backward()
    return moved


def narrowed_rows(moved):
    """Rows as wide as the model that were cast to bfloat16."""
    casts = [shape for *dtypes, shape in moved.casts if dtypes == [torch.float32, torch.bfloat16]]
    return sum(shape[0] for shape in casts if shape[1:] == (WIDTH,))


@pytest.mark.parametrize(
    ("weight_dtype", "with_entropy"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_the_head_moves_less_than_a_tenth_of_what_the_layers_move(monkeypatch, weight_dtype, with_entropy):
    """148 GB of 1,908 GB; a weight in another dtype is cast once in each direction."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", head.GPU_CHUNK_ELEMENTS)
    per_layer = bytes_of_layers(2) - bytes_of_layers(1)
    moved = moved_by_head(weight_dtype, with_entropy)
    assert moved.bytes < 0.1 * NUM_LAYERS * per_layer
    of_hidden = ACTIONS  # its gradient, once
    assert narrowed_rows(moved) == of_hidden + (2 * VOCABULARY if weight_dtype == torch.float32 else 0)
