import math
from dataclasses import replace

import pytest

from turnwise.rollout.batching.costs import CallCosts
from turnwise.rollout.batching.flush import REASONS, Adaptive, Lockstep, View

VIEW = View(queued=3, in_service=0, live=10, overdue=False, slots=4, free=4, costs=None, learning=False)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, ""),
        ({"overdue": True}, "waited"),
        ({"queued": 8}, "full"),
        ({"queued": 9, "overdue": True}, "full"),
        ({"queued": 7}, ""),
        ({"live": 3}, "everyone"),
        ({"live": 0}, "everyone"),
        ({"in_service": 7}, "everyone"),
        ({"in_service": 6}, ""),
        ({"in_service": 6, "overdue": True}, "waited"),
    ],
)
def test_when_the_adaptive_rule_flushes(given, reason):
    assert Adaptive(max_batch=8).reason(replace(VIEW, **given)) == reason
    assert reason in ("", *REASONS)


@pytest.mark.parametrize(
    ("queued", "slots", "costs", "size"),
    [
        (100, 4, CallCosts(1.0, 0.1), 25),  # a slot's share, between 10 and 100
        (20, 4, CallCosts(1.0, 0.1), 10),  # at least c0 / c1
        (7, 4, CallCosts(1.0, 0.1), 7),  # but no more than there are
        (200, 1, CallCosts(1.0, 0.1), 64),  # at most max_batch
        (200, 1, CallCosts(1.0, 0.25), 40),  # at most 10 c0 / c1
        (60, 4, CallCosts(0.05, 2.0), 1),
        (60, 4, CallCosts(1e-6, 1e-6), 10),
        (60, 4, CallCosts(6.0, 1e-6), 60),
        (1, 4, CallCosts(6.0, 1e-6), 1),
    ],
)
def test_how_much_the_adaptive_rule_takes(queued, slots, costs, size):
    view = replace(VIEW, queued=queued, slots=slots, costs=costs)
    assert Adaptive(max_batch=64).sizes(view) == [size]
    low, high = math.ceil(costs.per_call / costs.per_item), math.ceil(10 * costs.per_call / costs.per_item)
    assert size == max(1, min(queued, 64, max(low, min(high, math.ceil(queued / slots)))))


def test_one_call_at_a_time_learns_the_prices():
    view = replace(VIEW, queued=60)
    assert Adaptive(256).sizes(view) == [15]
    assert Adaptive(256).sizes(replace(view, slots=1)) == [60]
    assert Adaptive(256).sizes(replace(view, learning=True)) == [1]
    assert Adaptive(256).sizes(replace(view, learning=True, costs=CallCosts(1.0, 0.1))) == [15]


@pytest.mark.parametrize("queued", [1, 5, 300])
def test_max_batch_1_is_one_call_each(queued):
    view = replace(VIEW, queued=queued, live=1000)
    assert Adaptive(max_batch=1).reason(view) == "full"
    assert Adaptive(max_batch=1).sizes(view) == [1]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"queued": 9}, ""),
        ({"queued": 9, "overdue": True}, ""),
        ({"queued": 10}, "everyone"),
        ({"queued": 4, "in_service": 6}, ""),
        ({"queued": 300, "live": 301}, ""),
    ],
)
def test_lockstep_waits_for_everyone_and_for_nothing_else(given, reason):
    assert Lockstep().reason(replace(VIEW, **given)) == reason


@pytest.mark.parametrize(
    ("queued", "free", "sizes"), [(10, 1, [10]), (10, 4, [3, 3, 2, 2]), (2, 4, [1, 1]), (300, 2, [150, 150])]
)
def test_lockstep_takes_everything_in_even_parts(queued, free, sizes):
    assert Lockstep().sizes(replace(VIEW, queued=queued, free=free, costs=CallCosts(0.05, 2.0))) == sizes
