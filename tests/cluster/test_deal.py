import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.tries import shared_turns
from support.making import few, make_model, make_turns
from turnwise.cluster.deal import busiest, cost_of, deal, idle_plan, split_for_ranks
from turnwise.plan.balance import Cost
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.tree import tree

COST = Cost(token=1.0, pair=0.01)


@few
@given(turns=shared_turns(min_turns=0, max_turns=12), budget=st.integers(1, 40), ranks=st.integers(1, 5))
def test_every_turn_is_dealt_once_and_all_ranks_make_the_same_passes(turns, budget, ranks):
    plans = cut(turns, budget)
    dealt = deal(plans, ranks, COST)
    assert len(dealt) == ranks
    found = sorted(turn for own in dealt for plan in own for turn in plan.turns.tolist())
    assert found == sorted(turn for plan in plans for turn in plan.turns.tolist())
    passes = [[len(plan.stretches) for plan in own] for own in dealt]
    assert passes[0]
    assert all(own == passes[0] for own in passes)
    most = max((plan.num_stretches for plan in plans), default=1)
    assert max(passes[0]) <= most


def test_plans_without_tokens_are_left_out():
    assert [len(own) for own in deal([tree([]), tree([])], 2, COST)] == [1, 1]


def test_an_idle_plan_has_passes_and_no_action():
    plan = idle_plan(3)
    assert len(plan.stretches) == plan.num_tokens == 3
    assert len(plan.action_nodes) == len(plan.turns) == 0
    assert all(len(stretch.picked) == 0 for stretch in plan.stretches)


def test_a_layout_is_spread_where_that_leaves_the_ranks_something_to_do():
    turns = [turn for seed in range(8) for turn in make_turns([(30, 5), (4, 5)], seed=seed)]
    for layout in (cut, pack):
        assert len(layout(turns, 10_000)) == 1
        spread_out = split_for_ranks(layout, 4, COST)(turns, 10_000)
        assert len(spread_out) >= 4
        assert busiest(spread_out, 4, COST) < 0.4 * busiest(layout(turns, 10_000), 4, COST)
        assert sum(plan.num_tokens for plan in spread_out) < 1.2 * sum(p.num_tokens for p in layout(turns, 10_000))


def test_a_layout_with_enough_plans_is_unchanged():
    turns = [turn for seed in range(8) for turn in make_turns([(30, 5), (4, 5)], seed=seed)]
    assert len(split_for_ranks(cut, 2, COST)(turns, 60)) == len(cut(turns, 60))
    assert split_for_ranks(cut, 1, COST) is cut


def test_one_long_turn_is_never_cut_into_stretches_for_the_sake_of_ranks():
    turns = make_turns([(50, 5)])
    [plan] = split_for_ranks(cut, 4, COST)(turns, 1000)
    assert plan.num_stretches == 1
    assert split_for_ranks(pack, 4, COST)([], 1000) == []


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_pair_costs_far_less_than_a_token(kind):
    cost = cost_of(make_model(kind))
    assert 0 < cost.pair < 0.01 * cost.token
    assert np.isfinite(cost.token)
