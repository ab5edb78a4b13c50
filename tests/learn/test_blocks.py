import itertools
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learn.test_attention import masked_attention
from plan.tries import shared_turns
from support.making import distance, make_turn
from turnwise.learn.blocks import BlockAttention, Relay
from turnwise.plan.blocks import blocks_of, within_window
from turnwise.plan.tree import tree

HEADS = [(4, 4), (4, 2), (4, 1)]
trees = shared_turns(min_turns=1, min_action=1, max_turns=10).map(tree)


def states_of(plan, heads=(4, 2), width=3, dtype=torch.float64, seed=0):
    """(query, key, value, gradient of the output), random."""
    random = torch.Generator().manual_seed(seed)
    count, kv = heads
    shapes = [(1, count, plan.num_tokens, width)] + [(1, kv, plan.num_tokens, width)] * 2
    shapes.append((1, plan.num_tokens, count, width))
    *states, pull = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in states], pull


def with_gradients(attend, states, pull):
    out = attend(*states)
    return out.detach(), *torch.autograd.grad(out, states, pull)


def by_mask(plan, states, pull, scaling):
    return with_gradients(lambda q, k, v: masked_attention(plan, q, k, v, scaling), states, pull)


def by_blocks(plan, states, pull, scaling):
    blocks = blocks_of(plan.parent, plan.exit, 0, plan.num_tokens)
    return with_gradients(lambda q, k, v: BlockAttention(blocks)(0, q, k, v, scaling), states, pull)


def by_stretches(plan, states, pull, scaling, edges, relay=None, layer=0):
    """The same in stretches: once from first to last for keys and values, then from last to first for gradients."""
    relay = Relay(plan.num_tokens) if relay is None else relay
    stretches = list(itertools.pairwise(edges))
    attends = [BlockAttention(blocks_of(plan.parent, plan.exit, *edge), edge[0], relay) for edge in stretches]
    query, key, value = states
    with torch.no_grad():
        outs = [
            attend(layer, query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], scaling)
            for attend, (start, end) in zip(attends, stretches, strict=True)
        ]
    gradients = [torch.zeros_like(x) for x in states]
    for attend, (start, end), before in reversed(list(zip(attends, stretches, outs, strict=True))):
        own = [x[:, :, start:end].detach().requires_grad_() for x in states]
        out = attend(layer, *own, scaling)
        assert torch.equal(out, before)
        for total, part in zip(gradients, torch.autograd.grad(out, own, pull[:, start:end]), strict=True):
            total[:, :, start:end] = part
    return torch.cat(outs, 1), *gradients


def errors(found, wanted):
    return [distance(one, other) for one, other in zip(found, wanted, strict=True)]


# ---------------------------------------------------------------- against the mask


@settings(max_examples=60, deadline=None)
@given(plan=trees, heads=st.sampled_from(HEADS), scaling=st.sampled_from([None, 0.7]), seed=st.integers(0, 99))
def test_blocks_equal_attention_under_the_ancestor_mask(plan, heads, scaling, seed):
    states, pull = states_of(plan, heads, seed=seed)
    found, wanted = by_blocks(plan, states, pull, scaling), by_mask(plan, states, pull, scaling)
    assert found[0].shape == (1, plan.num_tokens, heads[0], 3)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    plan=trees,
    heads=st.sampled_from(HEADS),
    scaling=st.sampled_from([None, 0.7]),
    edges=st.lists(st.integers(1, 60), max_size=5),
)
def test_stretches_equal_attention_under_the_ancestor_mask(plan, heads, scaling, edges):
    edges = sorted({0, plan.num_tokens, *(edge for edge in edges if edge < plan.num_tokens)})
    states, pull = states_of(plan, heads)
    found, wanted = by_stretches(plan, states, pull, scaling, edges), by_mask(plan, states, pull, scaling)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(plan=trees, heads=st.sampled_from(HEADS))
def test_every_token_may_be_a_stretch(plan, heads):
    states, pull = states_of(plan, heads)
    edges = list(range(plan.num_tokens + 1))
    assert max(errors(by_stretches(plan, states, pull, None, edges), by_mask(plan, states, pull, None))) < 1e-12


@settings(max_examples=30, deadline=None)
@given(plan=trees, heads=st.sampled_from(HEADS), seed=st.integers(0, 99))
def test_float32_is_near_the_truth(plan, heads, seed):
    states, pull = states_of(plan, heads, dtype=torch.float32, seed=seed)
    truth = by_mask(plan, [x.detach().double().requires_grad_() for x in states], pull.double(), None)
    assert max(errors(by_blocks(plan, states, pull, None), truth)) < 1e-5
    edges = sorted({0, plan.num_tokens // 3, plan.num_tokens // 2, plan.num_tokens})
    assert max(errors(by_stretches(plan, states, pull, None, edges), truth)) < 1e-5


def large_plan():
    """Chains longer than every tile of the kernels, branches of many sizes, squares of several chains."""
    random = np.random.default_rng(0)
    stem = random.integers(0, 9, 1100)
    turns = [make_turn(stem[:size], random.integers(10, 99, more)) for size, more in ((900, 700), (300, 260), (1, 40))]
    turns += [make_turn(stem[:1000], [200 + place, *random.integers(0, 9, 64)]) for place in range(3)]
    turns += [make_turn([300 + place], random.integers(0, 9, 200)) for place in range(2)]
    return tree(turns)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("heads", [(2, 2), (2, 1)])
def test_long_chains_are_exact_too(dtype, tolerance, heads):
    plan = large_plan()
    assert max(square.length for square in plan.stretches[0].blocks.squares) > 1024
    states, pull = states_of(plan, heads, 16, dtype)
    wide = [x.detach().double().requires_grad_() for x in states], pull.double()
    truth = by_mask(plan, *wide, None)
    assert max(errors(by_blocks(plan, states, pull, None), truth)) < tolerance
    edges = np.linspace(0, plan.num_tokens, 5).astype(int).tolist()
    assert max(errors(by_stretches(plan, states, pull, None, edges), truth)) < tolerance


# ---------------------------------------------------------------- bfloat16


def test_bfloat16_is_no_further_from_the_truth_than_a_dense_mask():
    """Summed over plans: of one small plan, one rounding more or less decides."""
    mine, theirs = np.zeros(4), np.zeros(4)
    random = np.random.default_rng(0)
    for seed in range(20):
        stem = random.integers(0, 3, 60)
        turns = [make_turn(stem[: random.integers(1, 60)], random.integers(0, 3, 12)) for _ in range(12)]
        plan = tree(turns)
        states, pull = states_of(plan, HEADS[seed % 3], 16, torch.bfloat16, seed)
        truth = by_mask(plan, [x.detach().double().requires_grad_() for x in states], pull.double(), None)
        dense = with_gradients(lambda q, k, v, plan=plan: dense_attention(plan, q, k, v), states, pull)
        found = by_blocks(plan, states, pull, None)
        assert {x.dtype for x in found} == {torch.bfloat16}
        middle = plan.num_tokens // 2
        handed = by_stretches(plan, states, pull, None, [0, middle, plan.num_tokens])
        for one in (found, handed):
            mine += np.array(errors([x.double() for x in one], truth)) / 2
        theirs += np.array(errors([x.double() for x in dense], truth))
    assert (mine <= theirs).all(), mine / theirs
    assert (theirs > 1e-3).all()


def dense_attention(plan, query, key, value):
    """SDPA with the ancestor mask, in the dtype it is given."""
    node = torch.arange(plan.num_tokens)
    visible = (node[None, :] <= node[:, None]) & (node[:, None] < torch.as_tensor(plan.exit)[None, :])
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    return out.transpose(1, 2)


# ---------------------------------------------------------------- strides


def test_states_may_lie_in_memory_in_any_order():
    plan = tree([make_turn([1, 2, 3, 4], [5, 6]), make_turn([1, 2, 3], [6, 7]), make_turn([1], [6, 7])])
    states, pull = states_of(plan)
    wanted = by_mask(plan, states, pull, None)
    for one, other in ((2, 3), (1, 2), (1, 3)):
        turned = [x.detach().transpose(one, other).contiguous().transpose(one, other).requires_grad_() for x in states]
        strange = pull.transpose(one, other).contiguous().transpose(one, other)
        assert max(errors(by_blocks(plan, turned, strange, None), wanted)) < 1e-12
        assert max(errors(by_stretches(plan, turned, strange, None, [0, 3, plan.num_tokens]), wanted)) < 1e-12


def test_gradients_may_be_expanded():
    """As those of a sum are: the same number everywhere, stored once."""
    plan = large_plan()
    states, pull = states_of(plan, (2, 1), 8)
    ones = torch.ones((), dtype=pull.dtype).expand_as(pull)
    assert max(errors(by_blocks(plan, states, ones, None), by_mask(plan, states, ones, None))) < 1e-12


def test_scores_far_apart_do_not_overflow():
    plan = tree([make_turn([1, 2, 3, 4], [5, 6]), make_turn([1, 2, 3], [6, 7]), make_turn([1], [6, 7])])
    states, pull = states_of(plan)
    states = [states[0].detach().mul(300).requires_grad_(), *states[1:]]
    found, wanted = by_blocks(plan, states, pull, 1.0), by_mask(plan, states, pull, 1.0)
    assert all(torch.isfinite(x).all() for x in found)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- the relay


def test_layers_do_not_mix():
    plan = tree([make_turn([1, 2, 3, 4], [5, 6]), make_turn([1, 2, 3], [6, 7])])
    relay, edges = Relay(plan.num_tokens), [0, 2, 5, plan.num_tokens]
    for layer in range(3):
        states, pull = states_of(plan, seed=layer)
        found = by_stretches(plan, states, pull, None, edges, relay, layer)
        assert max(errors(found, by_mask(plan, states, pull, None))) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_relay_knows_its_bytes(dtype):
    plan = tree([make_turn([1, 2, 3, 4], [5, 6]), make_turn([1, 2, 3], [6, 7])])
    relay = Relay(plan.num_tokens)
    assert relay.num_bytes == 0
    states, pull = states_of(plan, (4, 2), 6, dtype)
    numbers = 2 * 2 * plan.num_tokens * 6  # keys and values of two heads
    with torch.no_grad():
        for layer in range(3):
            query, key, value = (x[:, :, :3] for x in states)
            BlockAttention(blocks_of(plan.parent, plan.exit, 0, 3), 0, relay)(layer, query, key, value, None)
            assert relay.num_bytes == (layer + 1) * numbers * dtype.itemsize
    by_stretches(plan, states, pull, None, [0, 3, plan.num_tokens], relay)
    wide = max(4, dtype.itemsize)
    assert relay.num_bytes == numbers * (3 * dtype.itemsize + wide), "gradients are added up in float32 at least"
    assert relay.key_grads[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def stretch_through(relay, plan, states, start):
    blocks = blocks_of(plan.parent, plan.exit, start, plan.num_tokens)
    query, key, value = (x[:, :, start:] for x in states)
    return BlockAttention(blocks, start, relay)(0, query, key, value, None)


def test_an_output_does_not_keep_the_relay_alive_once_it_is_differentiated():
    plan = tree([make_turn([1, 2, 3, 4], [5, 6])])
    states, _ = states_of(plan)
    relay = Relay(plan.num_tokens)
    gone = weakref.ref(relay)
    out = stretch_through(relay, plan, states, 0)
    del relay
    assert gone() is not None
    out.sum().backward()
    assert gone() is None
    assert out.grad_fn is not None


def test_a_relay_adds_up_a_gradient_only_once():
    plan = tree([make_turn([1, 2, 3, 4], [5, 6])])
    states, _ = states_of(plan)
    out = stretch_through(Relay(plan.num_tokens), plan, states, 0)
    out.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="differentiated once"):
        out.sum().backward()


@pytest.mark.parametrize("handed", [True, False])
def test_keys_and_values_are_kept_once(handed):
    plan = tree([make_turn([1] * 30, [5, 6])])
    (query, key, value), _ = states_of(plan, (2, 2), 5)
    kept = []
    relay = Relay(plan.num_tokens) if handed else None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        BlockAttention(blocks_of(plan.parent, plan.exit, 0, plan.num_tokens), 0, relay)(0, query, key, value, None)
    of_states = 2 * plan.num_tokens * 5
    assert sum(kept) == of_states * (2 if handed else 4) + 2 * plan.num_tokens


def test_no_tokens_are_no_work():
    nodes = np.zeros(0, np.int32)
    blocks = blocks_of(nodes, nodes, 0, 0)
    states = [torch.zeros(1, 2, 0, 3, requires_grad=True) for _ in range(3)]
    query, key, value = states
    out = BlockAttention(blocks)(0, query, key, value, None)
    out.sum().backward()
    assert out.shape == (1, 0, 2, 3)
    assert all(x.grad.shape == x.shape for x in states)


def test_the_mask_tells_trees_from_chains():
    """What these tests rest on: the same tokens in a row attend to something else."""
    one = tree([make_turn([1, 2, 3], [4]), make_turn([1, 2], [5, 6])])
    other = tree([make_turn([1, 2, 3], [4, 5, 6])])
    states, pull = states_of(one)
    assert one.num_tokens == other.num_tokens
    assert min(errors(by_mask(one, states, pull, None), by_mask(other, states, pull, None))) > 1e-2
    assert not math.isnan(float(by_mask(one, states, pull, None)[0].sum()))


# ---------------------------------------------------------------- sinks


def with_a_sink_key(plan, states, sinks, pull):
    """The definition: one more key in every softmax, whose value is zero."""
    query, key, value = states
    heads, kv_heads = query.shape[1], key.shape[1]
    wide_key, wide_value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    node = torch.arange(plan.num_tokens)
    visible = (node[None, :] <= node[:, None]) & (node[:, None] < torch.as_tensor(plan.exit)[None, :])
    scores = (query @ wide_key.transpose(2, 3) * query.shape[-1] ** -0.5).masked_fill(~visible, -math.inf)
    column = sinks[None, :, None, None].expand(1, heads, plan.num_tokens, 1)
    out = (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ wide_value).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, [*states, sinks], pull)


def some_sinks(heads, seed):
    return torch.randn(heads[0], generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@settings(max_examples=40, deadline=None)
@given(plan=trees, heads=st.sampled_from(HEADS), seed=st.integers(0, 99))
def test_a_sink_is_a_key_without_a_value(plan, heads, seed):
    states, pull = states_of(plan, heads, seed=seed)
    sinks = some_sinks(heads, seed)
    attend = BlockAttention(blocks_of(plan.parent, plan.exit, 0, plan.num_tokens))
    query, key, value = states
    out = attend(0, query, key, value, None, sinks)
    found = out.detach(), *torch.autograd.grad(out, [*states, sinks], pull)
    for one, other in zip(found, with_a_sink_key(plan, states, sinks, pull), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_sinks_of_stretches_add_up():
    plan = tree([make_turn(range(20), range(20, 30)), make_turn(range(12), range(40, 60))])
    states, pull = states_of(plan)
    sinks = some_sinks((4, 2), 1)
    relay = Relay(plan.num_tokens)
    edges = [(0, 11), (11, 30), (30, plan.num_tokens)]
    attends = [BlockAttention(blocks_of(plan.parent, plan.exit, *edge), edge[0], relay) for edge in edges]
    with torch.no_grad():
        for attend, (start, end) in zip(attends, edges, strict=True):
            query, key, value = (x[:, :, start:end] for x in states)
            attend(0, query, key, value, None, sinks)
    gradients = [torch.zeros_like(x) for x in (*states, sinks)]
    for attend, (start, end) in reversed(list(zip(attends, edges, strict=True))):
        own = [x[:, :, start:end].detach().requires_grad_() for x in states]
        query, key, value = own
        out = attend(0, query, key, value, None, sinks)
        *parts, of_sinks = torch.autograd.grad(out, [*own, sinks], pull[:, start:end])
        for total, part in zip(gradients, parts, strict=False):
            total[:, :, start:end] = part
        gradients[-1] += of_sinks
    for one, other in zip(gradients, with_a_sink_key(plan, states, sinks, pull)[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- windows


def through_a_window(plan, states, pull, window):
    """The definition: a token sees the ancestors less than a window above it."""
    query, key, value = states
    heads, kv_heads = query.shape[1], key.shape[1]
    wide_key, wide_value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
    node, depth = torch.arange(plan.num_tokens), torch.as_tensor(plan.depth)
    visible = (node[None, :] <= node[:, None]) & (node[:, None] < torch.as_tensor(plan.exit)[None, :])
    visible &= depth[:, None] - depth[None, :] < window
    scores = (query @ wide_key.transpose(2, 3) * query.shape[-1] ** -0.5).masked_fill(~visible, -math.inf)
    out = (scores.softmax(-1) @ wide_value).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, states, pull)


@settings(max_examples=60, deadline=None)
@given(plan=trees, heads=st.sampled_from(HEADS), window=st.integers(1, 12), seed=st.integers(0, 99))
def test_windows_in_blocks_are_windows_on_paths(plan, heads, window, seed):
    states, pull = states_of(plan, heads, seed=seed)
    attend = BlockAttention(blocks_of(plan.parent, plan.exit, 0, plan.num_tokens), depth=plan.depth)
    query, key, value = states
    out = attend(0, query, key, value, None, window=window)
    found = out.detach(), *torch.autograd.grad(out, states, pull)
    for one, other in zip(found, through_a_window(plan, states, pull, window), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [7, 300, 700])
def test_windows_on_long_chains(window):
    """Longer than the kernel's own tiles, so that whole tiles of a mask are hidden."""
    plan = tree([make_turn(range(1500), range(40)), make_turn([*range(900), 1], range(600)), make_turn([5], range(3))])
    states, pull = states_of(plan, (2, 1))
    attend = BlockAttention(blocks_of(plan.parent, plan.exit, 0, plan.num_tokens), depth=plan.depth)
    query, key, value = states
    out = attend(0, query, key, value, None, window=window)
    found = out.detach(), *torch.autograd.grad(out, states, pull)
    for one, other in zip(found, through_a_window(plan, states, pull, window), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_window_computes_few_pairs_beyond_it():
    plan = tree([make_turn(range(2000), range(2000, 2100)), make_turn(range(1000), range(3000, 3900))])
    blocks = blocks_of(plan.parent, plan.exit, 0, plan.num_tokens)
    exact = int(np.minimum(plan.depth + 1, 64).sum())
    assert exact < within_window(blocks, plan.depth, 64).num_pairs < 2.1 * exact
    assert blocks.num_pairs > 10 * exact
