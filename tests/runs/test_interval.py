import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.runs.interval import clustered, difference_interval, half_width, independent_attempts, wilson


@pytest.mark.parametrize(
    ("successes", "n", "expected"),
    [(8, 10, (0.4902, 0.9433)), (0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (50, 100, (0.4038, 0.5962))],
)
def test_known_values(successes, n, expected):
    assert wilson(successes, n) == pytest.approx(expected, abs=1e-4)


def test_nothing_tried():
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 10_000), st.data())
def test_within_bounds_around_the_share_and_symmetric(n, data):
    successes = data.draw(st.integers(0, n))
    low, high = wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert low < high
    mirrored = wilson(n - successes, n)
    assert math.isclose(low, 1 - mirrored[1], abs_tol=1e-12)
    assert math.isclose(high, 1 - mirrored[0], abs_tol=1e-12)


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3), (0, -1)])
def test_impossible_counts(successes, n):
    with pytest.raises(ValueError, match="between 0 and n"):
        wilson(successes, n)


def test_one_attempt_a_task_is_wilson():
    tallies = [(1, 1)] * 8 + [(0, 1)] * 2
    assert clustered(tallies) == wilson(8, 10)


def test_attempts_that_are_all_alike_tell_no_more_than_their_tasks():
    assert clustered([(8, 8), (0, 8)]) == pytest.approx(wilson(1, 2))
    assert clustered([(8, 8)] * 5) == wilson(5, 5)
    assert clustered([]) == clustered([(0, 0)]) == (0.0, 1.0)


def test_attempts_that_are_independent_tell_as_much_as_tasks():
    assert clustered([(2, 4)] * 10) == pytest.approx(wilson(20, 40))


def coverage(interval, tasks, attempts, draws=2000):
    """Share of evaluations, of tasks of any difficulty, whose interval holds the true rate."""
    random = np.random.default_rng(tasks * 100 + attempts)
    held = 0
    for _ in range(draws):
        chances = random.beta(0.6, 0.3, tasks)
        low, high = interval([(int(n), attempts) for n in random.binomial(attempts, chances)])
        held += low <= 0.6 / 0.9 <= high
    return held / draws


@pytest.mark.parametrize(("tasks", "attempts"), [(30, 1), (30, 8), (200, 4), (101, 3)])
def test_the_interval_holds_the_truth_as_often_as_it_says(tasks, attempts):
    assert 0.93 <= coverage(clustered, tasks, attempts) <= 0.98


def test_counting_attempts_as_independent_would_not():
    naive = lambda tallies: wilson(sum(s for s, _ in tallies), sum(n for _, n in tallies))
    assert coverage(naive, 30, 8) < 0.75


@given(st.lists(st.integers(0, 6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=12))
def test_any_tallies_have_an_interval_around_their_rate(tallies):
    low, high = clustered(tallies)
    total = sum(n for _, n in tallies)
    rate = sum(s for s, _ in tallies) / total if total else 0.0
    assert 0.0 <= low <= rate + 1e-12
    assert rate - 1e-12 <= high <= 1.0


def test_the_interval_of_a_mean_is_students():
    assert half_width([0.0, 1.0, 2.0]) == pytest.approx(4.303 / 3**0.5)
    assert half_width([0.0, 1.0] * 20) == pytest.approx(2.0227 * np.std([0.0, 1.0] * 20, ddof=1) / 40**0.5, rel=1e-3)
    assert math.isnan(half_width([0.5]))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        # Newcombe (1998, page 873), table II, method 10: 56/70 - 48/80, 9/10 - 3/10, 10/10 - 0/10
        ((48, 80, 56, 70), (0.0524, 0.3339)),
        ((3, 10, 9, 10), (0.1705, 0.8090)),
        ((0, 10, 10, 10), (0.6075, 1.0)),
    ],
)
def test_the_interval_of_a_difference(counts, expected):
    one, num_one, two, num_two = counts
    first, second = (one / num_one, *wilson(one, num_one)), (two / num_two, *wilson(two, num_two))
    assert difference_interval(first, second) == pytest.approx(expected, abs=1e-3)
    low, high = difference_interval(second, first)
    assert (-high, -low) == pytest.approx(expected, abs=1e-3)


def test_the_interval_of_pairs_is_narrower_where_results_agree():
    first, second = (0.5, *wilson(25, 50)), (0.6, *wilson(30, 50))
    widths = [high - low for low, high in (difference_interval(first, second, c) for c in (-0.5, 0.0, 0.5, 0.9))]
    assert widths == sorted(widths, reverse=True)


def test_independent_attempts_are_between_tasks_and_attempts():
    assert independent_attempts([(8, 8), (0, 8)]) == 2
    assert independent_attempts([(4, 8), (4, 8), (4, 8)]) == 24
    assert independent_attempts([]) == 0
