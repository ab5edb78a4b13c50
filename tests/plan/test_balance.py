import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few, make_turns
from turnwise.plan.balance import Cost, balance
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack


def busiest(shares, costs):
    return max(sum(costs[group] for group in share) for share in shares)


@few
@given(st.lists(st.floats(0.01, 100.0), max_size=40), st.integers(1, 8))
def test_every_group_has_one_rank(costs, ranks):
    shares = balance(costs, ranks)
    assert len(shares) == ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))


@few
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=7), st.integers(1, 3))
def test_the_busiest_rank_is_within_a_fifth_of_the_best_there_is(costs, ranks):
    best = min(
        busiest([[g for g, r in enumerate(place) if r == rank] for rank in range(ranks)], costs)
        for place in itertools.product(range(ranks), repeat=len(costs))
    )
    assert busiest(balance(costs, ranks), costs) <= best * 1.2 + 1e-9


def test_many_groups_balance_within_a_percent():
    costs = np.random.default_rng(0).lognormal(0.0, 1.0, 256).tolist()
    assert busiest(balance(costs, 8), costs) <= sum(costs) / 8 * 1.01


def test_there_is_at_least_one_rank():
    with pytest.raises(ValueError, match="at least one rank"):
        balance([1.0], 0)


def test_a_fit_finds_what_was_paid():
    plans = [plan for size in (5, 20, 60) for plan in pack(make_turns([(size, 5)] * 3), 10_000)]
    paid = Cost(2.0, 0.5)
    fitted = Cost.fitted(plans, [paid.of(plan) for plan in plans])
    assert (fitted.token, fitted.pair) == pytest.approx((2.0, 0.5))


@pytest.mark.parametrize("paid", [Cost(2.0, 0.0), Cost(0.0, 3.0)])
def test_a_fit_is_never_negative(paid):
    plans = [plan for size in (5, 20, 60) for plan in pack(make_turns([(size, 5)] * 3), 10_000)]
    noise = np.random.default_rng(1).uniform(0.8, 1.2, len(plans))
    fitted = Cost.fitted(plans, [paid.of(plan) * n for plan, n in zip(plans, noise, strict=True)])
    assert fitted.token >= 0
    assert fitted.pair >= 0


def test_several_stretches_cost_a_second_forward():
    turns = make_turns([(10, 5), (10, 5)])
    [whole], [long] = cut(turns, 100), cut(turns, 8)
    assert long.num_stretches > 1
    assert Cost(1.0, 1.0).of(long) == pytest.approx(Cost(1.0, 1.0).of(whole) * 4 / 3)
