import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.making import make_turns
from turnwise.learn.attention import NAME, PackedAttention, attention_forward, register
from turnwise.plan.pack import pack


def masked_attention(plan, query, key, value, scaling):
    """One big softmax in which token i sees token j exactly when j <= i < exit[j]."""
    heads, kv_heads = query.shape[1], key.shape[1]
    key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    node = torch.arange(plan.num_tokens)
    visible = (node[None, :] <= node[:, None]) & (node[:, None] < torch.as_tensor(plan.exit)[None, :])
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=5),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    scaling=st.sampled_from([None, 0.7]),
    growing=st.booleans(),
)
def test_packed_attention_equals_attention_under_the_ancestor_mask(sizes, heads, scaling, growing):
    [plan] = pack(make_turns(sizes, growing=growing), 10_000)
    random = torch.Generator().manual_seed(plan.num_tokens)
    shapes = [(1, count, plan.num_tokens, 3) for count in (heads[0], heads[1], heads[1])]
    states = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]
    query, key, value = states
    found = PackedAttention(plan.stretches[0].blocks)(0, query, key, value, scaling)
    wanted = masked_attention(plan, query, key, value, scaling)
    assert found.shape == (1, plan.num_tokens, heads[0], 3)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    pull = torch.randn(found.shape, generator=random, dtype=torch.float64)
    gradients = [torch.autograd.grad((out * pull).sum(), states) for out in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_turn_alone_gets_bit_for_bit_what_it_gets_in_company():
    turns = make_turns([(3, 2), (4, 3), (5, 1)], growing=False)
    [together] = pack(turns, 100)
    random = torch.Generator().manual_seed(0)
    states = [torch.randn(1, 2, together.num_tokens, 4, generator=random) for _ in range(3)]
    query, key, value = states
    out = PackedAttention(together.stretches[0].blocks)(0, query, key, value, None)
    starts = np.flatnonzero(together.depth == 0)
    for turn, start in zip(together.turns, starts, strict=True):
        [alone] = pack([turns[turn]], 100)
        part = slice(start, start + alone.num_tokens)
        query, key, value = (x[:, :, part] for x in states)
        assert torch.equal(PackedAttention(alone.stretches[0].blocks)(0, query, key, value, None), out[:, part])


def test_a_model_without_an_attend_callable_is_an_error_and_not_a_guess():
    from support.making import make_model

    register()
    register()
    model = make_model()
    model.set_attn_implementation(NAME)
    with pytest.raises(TypeError, match="attend"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("width", [2, 7])
def test_values_of_another_width_than_keys_keep_it(width):
    seen = {}

    def attend(layer, query, key, value, scaling):
        seen.update(widths={query.shape[-1], key.shape[-1], value.shape[-1]}, scaling=scaling)
        return PackedAttention(plan.stretches[0].blocks)(layer, query, key, value, scaling)

    [plan] = pack(make_turns([(3, 2), (4, 1)], growing=False), 100)
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, plan.num_tokens, size, generator=random, dtype=torch.float64) for size in (4, 4, width)
    )
    found, _ = attention_forward(SimpleNamespace(layer_idx=0), query, key, value, None, attend=attend)
    assert seen == {"widths": {max(4, width)}, "scaling": 0.5}
    torch.testing.assert_close(found, masked_attention(plan, query, key, value, 0.5), rtol=1e-12, atol=1e-12)
