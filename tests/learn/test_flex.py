from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from plan.tries import random_turns
from support.making import make_turn, make_turns
from turnwise.learn.blocks import BlockAttention
from turnwise.learn.flex import TILE, FlexAttention, block_mask, tiles
from turnwise.plan.pack import pack
from turnwise.plan.tree import tree


def random_tree(seed, num_turns=8, size=120, prefix=0):
    """A tree of a few hundred nodes below a prefix that all turns share; chains of all lengths branch off."""
    turns = random_turns(Random(seed), num_turns, size, 1, range(9))
    return tree([make_turn([*range(prefix), *turn.prompt], turn.action) for turn in turns])


def chain(size):
    return np.full(size, size, np.int32)


def rows_of(counts, indices):
    """The tiles of each row, without empty rows at the end."""
    rows = [set(row[:count].tolist()) for row, count in zip(indices[0, 0], counts[0, 0].tolist(), strict=True)]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def assert_as_torch_has_it(exits, start=0):
    """Tile by tile what torch finds when it looks at every pair, for the forward pass and for the backward pass."""
    ours = block_mask(exits, "cpu", start=start)
    sizes = len(exits) - start, len(exits)
    theirs = create_block_mask(ours.mask_mod, 1, 1, *sizes, device="cpu", BLOCK_SIZE=TILE)
    assert ours.seq_lengths == theirs.seq_lengths == sizes
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for side in ("kv", "full_kv", "q", "full_q"):
        one, other = (
            rows_of(getattr(mask, f"{side}_num_blocks"), getattr(mask, f"{side}_indices")) for mask in (ours, theirs)
        )
        assert one == other, side
    rows, columns = (-(-size // TILE) for size in sizes)
    assert torch.equal(ours.to_dense()[..., :rows, :columns], theirs.to_dense())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    num_turns=st.integers(1, 12),
    size=st.sampled_from([3, 40, 120, 250]),
    prefix=st.sampled_from([0, 130, 512, 700]),
)
def test_tiles_of_trees_are_those_that_torch_finds(seed, num_turns, size, prefix):
    assert_as_torch_has_it(random_tree(seed, num_turns, size, prefix).exit)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    num_turns=st.integers(1, 12),
    size=st.sampled_from([40, 120, 250]),
    prefix=st.sampled_from([0, 130, 512]),
    data=st.data(),
)
def test_tiles_of_stretches_are_those_that_torch_finds(seed, num_turns, size, prefix, data):
    """Whose keys begin before their queries, at the border of a tile or within it."""
    exits = random_tree(seed, num_turns, size, prefix).exit
    end = data.draw(st.integers(1, len(exits)))
    start = data.draw(st.one_of(st.integers(0, end - 1), st.sampled_from(range(0, end, TILE))))
    assert_as_torch_has_it(exits[:end], start)


@pytest.mark.parametrize("size", [1, 2, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 37, 4 * TILE])
def test_tiles_of_chains_are_those_that_torch_finds(size):
    assert_as_torch_has_it(chain(size))
    assert_as_torch_has_it(np.arange(1, size + 1, dtype=np.int32))
    packed = pack(make_turns([(size, 1), (5, 2), (size, 3), (TILE, TILE)], growing=False), 10_000)
    assert_as_torch_has_it(packed[0].exit)


@pytest.mark.parametrize("end", [TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1])
def test_subtrees_that_end_at_the_border_of_a_tile(end):
    """Two chains, of which the first ends a token before a border, at it, or a token after."""
    assert_as_torch_has_it(np.repeat([end, 300], [end, 300 - end]).astype(np.int32))


def test_the_trees_above_have_full_tiles_partial_ones_and_empty_ones():
    masked, full = tiles(random_tree(3, 12, 120, 512).exit)
    lower = len(full) * (len(full) + 1) // 2
    assert full.sum() > 5
    assert masked.sum() > 5
    assert masked.sum() + full.sum() < lower
    assert not (masked & full).any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_attention_equals_that_of_blocks(heads):
    torch._dynamo.reset()
    for plan, scaling in ((random_tree(3), None), (random_tree(5, 3, 20), 0.3), (random_tree(7), 0.3)):
        random = torch.Generator().manual_seed(plan.num_tokens)
        shapes = [(1, count, plan.num_tokens, 16) for count in (heads[0], heads[1], heads[1])]
        states = [torch.randn(shape, generator=random) for shape in shapes]
        query, key, value = states
        found = FlexAttention(plan.exit, "cpu")(0, query, key, value, scaling)
        wanted = BlockAttention(plan.stretches[0].blocks)(0, query, key, value, scaling)
        assert found.shape == wanted.shape == (1, plan.num_tokens, heads[0], 16)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_sinks_in_one_kernel_are_those_of_blocks():
    plan = random_tree(3)
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, plan.num_tokens, 16, generator=random, dtype=torch.float64) for heads in (4, 2, 2)
    )
    sinks = torch.randn(4, generator=random, dtype=torch.float64)
    found = FlexAttention(plan.exit, "cpu")(0, query, key, value, None, sinks=sinks)
    wanted = BlockAttention(plan.stretches[0].blocks)(0, query, key, value, None, sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # its log-sum-exp is in float32
    assert not torch.allclose(found, FlexAttention(plan.exit, "cpu")(0, query, key, value, None), atol=1e-2)


@pytest.mark.parametrize("window", [1, 40, 128, 300])
def test_windows_in_one_kernel_are_those_of_blocks(window):
    plan = random_tree(5, prefix=512)
    random = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, plan.num_tokens, 16, generator=random, dtype=torch.float64) for heads in (4, 2, 2)
    )
    found = FlexAttention(plan.exit, "cpu", plan.depth)(0, query, key, value, None, window=window)
    wanted = BlockAttention(plan.stretches[0].blocks, depth=plan.depth)(0, query, key, value, None, window=window)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_tiles_beyond_a_window_are_left_out():
    plan = random_tree(5, prefix=1024)
    masks = [block_mask(plan.exit, "cpu", plan.depth, window) for window in (None, 100)]
    everything, near = (int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) for mask in masks)
    assert near < everything / 2
    visible = masks[1].mask_mod
    theirs = create_block_mask(visible, 1, 1, plan.num_tokens, plan.num_tokens, device="cpu", BLOCK_SIZE=TILE)
    assert (masks[1].to_dense() >= theirs.to_dense()).all()
