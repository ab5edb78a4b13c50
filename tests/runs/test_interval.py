import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.runs.interval import wilson


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
