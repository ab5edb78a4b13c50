import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.tries import assert_lays_out, sequence, shared_turns, trained
from support.making import few, make_turn
from turnwise.plan.cut import AGAIN, IN_STRETCHES, cut, parts
from turnwise.plan.tree import sort_rows, tree

many = settings(max_examples=200, deadline=None)
some_turns = shared_turns(min_turns=1, min_action=1)


def longest(turns):
    return max((len(sequence(turns[place])) for place in trained(turns)), default=0)


# ---------------------------------------------------------------- against all cuts


def size_of(lengths, shared, part):
    low, high = part
    return int(lengths[low]) + sum(int(lengths[row] - shared[row]) for row in range(low + 1, high))


def price(lengths, shared, budget, chosen):
    """(cost, parts within the budget) of a cut, None where it is not allowed."""
    cost = count = 0
    for low, high in chosen:
        size = size_of(lengths, shared, (low, high))
        cost += AGAIN * int(shared[low])
        if size <= budget:
            count += 1
        elif lengths[low:high].max() > budget and size <= lengths.max() + budget:
            cost += IN_STRETCHES * size
        else:
            return None
    return cost, count


def every_cut(count):
    for number in range(count):
        for inner in itertools.combinations(range(1, count), number):
            yield list(itertools.pairwise([0, *inner, count]))


def sorted_rows(turns):
    rows, sequences = sort_rows(turns, trained(turns))
    return np.array([len(sequences[row.turn]) for row in rows]), np.array([row.shared for row in rows])


@many
@given(some_turns, st.integers(1, 24))
def test_no_allowed_cut_is_better(turns, budget):
    lengths, shared = sorted_rows(turns)
    found = parts(lengths, shared, budget)
    assert all(low < high for low, high in found)
    assert found[0][0] == 0
    assert found[-1][1] == len(lengths)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    allowed = [made for cut in every_cut(len(lengths)) if (made := price(lengths, shared, budget, cut))]
    assert price(lengths, shared, budget, found) == min(allowed)


@many
@given(some_turns, st.integers(0, 12))
def test_where_nothing_is_long_no_cut_has_fewer_tokens_or_as_many_in_fewer_passes(turns, more):
    lengths, shared = sorted_rows(turns)
    budget = longest(turns) + more
    plans = cut(turns, budget)
    best = min(
        (sum(sizes), len(sizes))
        for cuts in every_cut(len(lengths))
        if max(sizes := [size_of(lengths, shared, part) for part in cuts]) <= budget
    )
    assert (sum(plan.num_tokens for plan in plans), len(plans)) == best


@few
@given(some_turns, st.lists(st.integers(0, 20), min_size=2, max_size=2))
def test_a_larger_budget_never_lays_out_more(turns, more):
    small, large = (sum(plan.num_tokens for plan in cut(turns, longest(turns) + extra)) for extra in sorted(more))
    assert small >= large


# ---------------------------------------------------------------- plans


@many
@given(shared_turns(), st.integers(1, 24))
def test_plans_are_tries_that_hold_every_turn_with_an_action_once(turns, budget):
    plans = cut(turns, budget)
    assert sorted(turn for plan in plans for turn in plan.turns.tolist()) == trained(turns)
    for plan in plans:
        assert len(plan.turns)
        assert_lays_out(plan, turns, plan.turns.tolist())


@many
@given(shared_turns(), st.integers(1, 24))
def test_every_pass_is_within_the_budget_and_only_long_turns_take_several(turns, budget):
    for plan in cut(turns, budget):
        assert plan.num_stretches == len(plan.stretches) == -(-plan.num_tokens // budget)
        assert [stretch.start for stretch in plan.stretches] == [0, *(s.end for s in plan.stretches[:-1])]
        assert plan.stretches[-1].end == plan.num_tokens
        assert all(0 < stretch.end - stretch.start <= budget for stretch in plan.stretches)
        long = max(len(sequence(turns[turn])) for turn in plan.turns) > budget
        assert (plan.num_stretches > 1) == long


@many
@given(shared_turns(), st.integers(1, 24))
def test_every_action_token_is_predicted_in_one_pass_by_the_token_before_it(turns, budget):
    for plan in cut(turns, budget):
        picked = np.concatenate([stretch.picked for stretch in plan.stretches])
        assert sorted(picked.tolist()) == list(range(len(plan.action_nodes)))
        for stretch in plan.stretches:
            assert np.array_equal(stretch.nodes[stretch.inverse], plan.action_nodes[stretch.picked])
            assert len(set(stretch.nodes.tolist())) == len(stretch.nodes)
            before = plan.parent[stretch.nodes]
            assert ((stretch.start <= before) & (before < stretch.end)).all()


@few
@given(shared_turns())
def test_a_budget_for_everything_gives_the_whole_tree(turns):
    plans = cut(turns, 10_000)
    assert len(plans) == (1 if trained(turns) else 0)
    for plan in plans:
        whole = tree(turns)
        for name in ("tokens", "depth", "parent", "exit", "turns", "offsets", "action_nodes"):
            assert np.array_equal(getattr(plan, name), getattr(whole, name))
        assert plan.num_stretches == 1


# ---------------------------------------------------------------- long paths


@many
@given(some_turns, st.integers(1, 24))
def test_the_memory_of_a_long_path_is_bounded(turns, budget):
    """Keys and values of a plan in stretches stay until it is done: of its longest path, and of one pass beside it."""
    for plan in cut(turns, budget):
        assert plan.num_tokens <= longest(turns) + budget


def chain(first, size):
    return make_turn([first] * (size - 1), [first])


def sizes(plans):
    return sorted((plan.num_tokens, plan.num_stretches) for plan in plans)


def test_a_long_turn_elsewhere_changes_nothing_for_the_others():
    """One long path is no reason to compute others in stretches, cheaper though it might be."""
    short = [make_turn([1] * 90 + [2] * 9, [2]), make_turn([1] * 90 + [3] * 9, [3])]
    assert sizes(cut(short, 100)) == [(100, 1), (100, 1)]
    assert sizes(cut([*short, chain(7, 300)], 100)) == [(100, 1), (100, 1), (300, 3)]


def test_long_paths_that_share_nothing_are_kept_apart():
    assert sizes(cut([chain(1, 110), chain(2, 120), chain(3, 400)], 100)) == [(110, 2), (120, 2), (400, 4)]


def test_long_paths_that_share_their_prompt_are_computed_together():
    turns = [make_turn([1] * 100 + [2] * 30, [2]), make_turn([1] * 100 + [3] * 30, [3])]
    assert sizes(cut(turns, 50)) == [(162, 4)]


def test_many_long_paths_with_a_little_in_common_are_not_all_kept_at_once():
    turns = [make_turn([9] * 10 + [first] * 110, [first]) for first in range(8)]
    found = cut(turns, 60)
    assert max(plan.num_tokens for plan in found) <= 121 + 60
    assert all(plan.num_stretches == 3 for plan in found)


def test_a_growing_attempt_longer_than_a_pass_stays_one_plan():
    history, turns = [], []
    for turn in range(6):
        history = [*history, *[2 * turn] * 20]
        turns.append(make_turn(history, [2 * turn + 1] * 5))
        history = [*history, *[2 * turn + 1] * 5]
    assert sizes(cut(turns, 40)) == [(150, 4)]


def test_a_budget_of_one_token_is_a_pass_per_token():
    [plan] = cut([make_turn([1, 2], [3, 4])], 1)
    assert [(stretch.start, stretch.end) for stretch in plan.stretches] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [stretch.picked.tolist() for stretch in plan.stretches] == [[], [0], [1], []]


# ---------------------------------------------------------------- examples


@pytest.mark.parametrize("turns", [[], [make_turn([1] * 50, [])]])
def test_nothing_to_train_makes_no_plans(turns):
    assert cut(turns, 8) == []


def test_the_cheapest_place_to_cut_is_where_least_is_shared():
    turns = [make_turn([1, 1, 1, token], [0]) for token in (2, 3)] + [
        make_turn([1, 5, 5, token], [0]) for token in (6, 7)
    ]
    assert [len(plan.turns) for plan in cut(turns, 8)] == [2, 2]
    assert sizes(cut(turns, 8)) == [(7, 1), (7, 1)]


def test_duplicates_cost_nothing_and_stay_together():
    turns = [make_turn([1, 2], [3])] * 5 + [make_turn([4, 5], [6])] * 4
    assert sizes(cut(turns, 3)) == [(3, 1), (3, 1)]
    assert sizes(cut(turns, 6)) == [(6, 1)]
