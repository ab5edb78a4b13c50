import random

import pytest

from turnwise.rollout.batching.costs import FLOOR, CostFit, fit


def line(per_call, per_item, sizes):
    return [(size, per_call + per_item * size) for size in sizes]


@pytest.mark.parametrize(("per_call", "per_item"), [(6.0, 0.05), (0.5, 0.01), (0.05, 2.0), (1e-3, 1e-4)])
def test_prices_are_found(per_call, per_item):
    found = fit(line(per_call, per_item, [1, 1, 7, 30, 200]))
    assert found.per_call == pytest.approx(per_call, rel=1e-6)
    assert found.per_item == pytest.approx(per_item, rel=1e-6)


def test_one_size_tells_nothing():
    assert fit(line(1.0, 1.0, [3, 3, 3])) is None
    assert CostFit().costs is None


def test_prices_never_fall_to_zero():
    constant = fit(line(2.0, 0.0, [1, 5, 9]))
    assert (constant.per_call, constant.per_item) == (pytest.approx(2.0), FLOOR)
    by_item = fit(line(0.0, 2.0, [1, 5, 9]))
    assert (by_item.per_call, by_item.per_item) == (FLOOR, pytest.approx(2.0, rel=1e-4))
    nothing = fit([(1, 0.0), (2, 0.0)])
    assert (nothing.per_call, nothing.per_item) == (FLOOR, FLOOR)
    downhill = fit([(1, 9.0), (9, 1.0)])
    assert downhill.per_call == pytest.approx(1.0)
    assert downhill.per_item >= FLOOR


def test_a_call_costs_at_most_the_fastest_measured_call():
    """Items side by side: a call is as slow as its slowest item, and a line through the points starts far too high."""
    draw = random.Random(0)
    calls = [(size, 0.2 + 4.0 * max(draw.lognormvariate(0, 1) for _ in range(size))) for size in [1, 2, 3] * 20]
    found = fit(calls)
    assert found.per_call <= min(seconds for _, seconds in calls)
    assert found.per_call < 0.5 * found.per_item


def test_an_expensive_call_stays_expensive_under_noise():
    draw = random.Random(1)
    calls = [(size, (6.0 + 0.05 * size) * draw.uniform(0.9, 1.1)) for size in range(1, 41)]
    assert fit(calls).per_call / fit(calls).per_item > 30


def test_what_changes_is_learned_anew():
    learned = CostFit(window=8)
    for size, seconds in line(6.0, 0.1, range(1, 20)):
        learned.observe(size, seconds)
    for size, seconds in line(0.5, 0.1, range(1, 9)):
        learned.observe(size, seconds)
    assert learned.costs.per_call == pytest.approx(0.5)
    for _ in range(8):
        learned.observe(3, 1.0)
    assert learned.costs is None
