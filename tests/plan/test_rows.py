"""Layouts of other systems: what they hold, what they cost, and that a merged one computes the same."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few, group_lists, make_turn, make_turns
from turnwise.plan.pack import pack
from turnwise.plan.rows import Rows, in_rows, merge, pad, pad_by_length
from turnwise.plan.tree import tree
from turnwise.types import turns_of


@st.composite
def batches(draw):
    """(turns, budget) of a mini-batch; its longest turn may be over the budget."""
    turns = list(turns_of(draw(group_lists(max_groups=3, max_turns=4))))
    return turns, draw(st.integers(1, 60))


def size(turn):
    return len(turn.prompt) + len(turn.action)


@few
@given(batches(), st.sampled_from([pad, pad_by_length]))
def test_every_turn_with_an_action_is_in_one_row_and_passes_keep_to_the_budget(batch, layout):
    turns, budget = batch
    found = layout(turns, budget)
    placed = [turn for rows in found for turn in rows.turns.tolist()]
    assert sorted(placed) == [place for place, turn in enumerate(turns) if len(turn.action)]
    for rows in found:
        assert rows.width == max(size(turns[turn]) for turn in rows.turns)
        assert rows.num_tokens <= budget or len(rows.turns) == 1
    # A pass ends only where the next row would not have fitted.
    for rows, following in itertools.pairwise(found):
        assert (len(rows.turns) + 1) * max(rows.width, size(turns[following.turns[0]])) > budget


@few
@given(batches())
def test_rows_keep_their_order_or_are_sorted(batch):
    turns, budget = batch
    in_order = [turn for rows in pad(turns, budget) for turn in rows.turns.tolist()]
    assert in_order == sorted(in_order)
    lengths = [size(turns[turn]) for rows in pad_by_length(turns, budget) for turn in rows.turns]
    assert lengths == sorted(lengths)


def test_rows_are_padded_on_the_right():
    turns = [make_turn([7, 8], [9]), make_turn([6], []), make_turn([7], [5])]
    [rows] = pad(turns, 6)
    assert rows.turns.tolist() == [0, 2]
    tokens, mask = rows.fill_in(turns)
    assert tokens.tolist() == [[7, 8, 9], [7, 5, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert (rows.num_tokens, rows.num_pairs) == (6, 12)
    assert [rows.turns.tolist() for rows in pad(turns, 5)] == [[0], [2]]


def test_pairs_are_those_of_causal_attention_over_the_whole_width():
    assert Rows(np.arange(3), 4).num_pairs == 3 * (1 + 2 + 3 + 4)


def test_no_turns_make_no_rows():
    nothing = [make_turn([1, 2], [])]
    assert pad(nothing, 8) == pad_by_length([], 8) == []
    assert merge(nothing, 8) == merge([], 8) == []


# ---------------------------------------------------------------- merging


@few
@given(batches())
def test_merged_plans_hold_every_turn_with_its_own_tokens(batch):
    turns, budget = batch
    plans = merge(turns, max([budget, *map(size, turns)]))
    found = {}
    for plan in plans:
        assert len(plan.offsets) == len(plan.turns) + 1
        for turn, start, end in zip(plan.turns.tolist(), plan.offsets[:-1], plan.offsets[1:], strict=True):
            path, node = [], int(plan.action_nodes[start:end][-1])
            while node >= 0:
                path.append(node)
                node = int(plan.parent[node])
            path = path[::-1]
            assert plan.depth[path].tolist() == list(range(len(path)))
            assert path[len(turns[turn].prompt) :] == plan.action_nodes[start:end].tolist()
            assert turn not in found
            found[turn] = plan.tokens[path].tolist()
    assert found == {place: [*turn.prompt, *turn.action] for place, turn in enumerate(turns) if len(turn.action)}


@few
@given(batches())
def test_merging_lies_between_packing_and_the_tree(batch):
    turns, _ = batch
    merged, packed = (sum(plan.num_tokens for plan in layout(turns, 10_000)) for layout in (merge, pack))
    assert tree(turns).num_tokens <= merged <= packed


def test_a_growing_attempt_is_one_chain_and_a_window_is_none():
    growing = make_turns([(4, 2), (3, 2), (1, 1)])
    [plan] = merge(growing, 100)
    assert plan.num_tokens == size(growing[-1]) == 13
    assert plan.turns.tolist() == [0, 1, 2]
    assert plan.action_nodes.tolist() == [4, 5, 9, 10, 12]
    windowed = make_turns([(4, 2), (3, 2), (1, 1)], growing=False)
    assert sum(plan.num_tokens for plan in merge(windowed, 100)) == sum(map(size, windowed))


def test_one_changed_token_in_the_history_ends_the_merging():
    first = make_turn([1, 2], [3])
    rewritten = make_turn([1, 2, 4, 5], [6])
    assert [plan.num_tokens for plan in merge([first, rewritten], 100)] == [8]
    assert [plan.num_tokens for plan in merge([first, make_turn([1, 2, 3, 5], [6])], 100)] == [5]


def test_a_turn_without_an_action_does_not_part_its_neighbours():
    turns = [make_turn([1, 2], [3]), make_turn([1, 2, 3, 4], []), make_turn([1, 2, 3, 4], [5])]
    [plan] = merge(turns, 100)
    assert plan.tokens.tolist() == [1, 2, 3, 4, 5]
    assert plan.turns.tolist() == [0, 2]


def test_a_chain_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="a merged chain has 13 tokens, more than 12; raise"):
        merge(make_turns([(4, 2), (3, 2), (1, 1)]), 12)


def test_a_merged_plan_computes_what_packing_computes():
    import torch

    from support.making import distance, make_model
    from turnwise.learn.policy import Policy

    turns = [*make_turns([(5, 3), (2, 1), (4, 4)], seed=1), *make_turns([(7, 2), (3, 5)], growing=False, seed=2)]
    policy = Policy(make_model(dtype="float64"), dtype=torch.float64)

    def logprobs(plans):
        parts = {}
        for plan in plans:
            [(_, found, _)] = policy.passes(plan)
            for turn, part in zip(plan.turns.tolist(), found.tensor_split(plan.offsets[1:-1].tolist()), strict=True):
                parts[turn] = part.detach()
        return torch.cat([parts[turn] for turn in sorted(parts)])

    merged, packed = merge(turns, 30), pack(turns, 30)
    assert sum(plan.num_tokens for plan in merged) < sum(plan.num_tokens for plan in packed)
    assert distance(logprobs(merged), logprobs(packed)) < 1e-13


@few
@given(batches())
def test_plans_in_rows_hold_what_merging_holds_and_fit_when_padded(batch):
    turns, _ = batch
    budget = max(map(size, turns), default=1) * 3
    plans = in_rows(turns, budget)
    held = sorted(turn for plan in plans for turn in plan.turns.tolist())
    assert held == [place for place, turn in enumerate(turns) if len(turn.action)]
    for plan in plans:
        rows = int((plan.depth == 0).sum())
        assert rows * (int(plan.depth.max()) + 1) <= budget
        assert not plan.stretches[0].blocks.rectangles, "nothing is shared"
        for turn, nodes in zip(plan.turns, np.split(plan.action_nodes, plan.offsets[1:-1]), strict=True):
            assert plan.tokens[nodes].tolist() == turns[turn].action.tolist()
    assert sum(plan.num_tokens for plan in plans) == sum(plan.num_tokens for plan in merge(turns, 10_000))


def test_a_row_over_the_budget_is_refused():
    with pytest.raises(
        ValueError, match=r"^a merged chain has 9 tokens, more than 8; raise max_tokens_per_microbatch$"
    ):
        in_rows(make_turns([(5, 4)]), 8)
