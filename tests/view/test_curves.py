import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.making import few
from turnwise.view.curves import points, thinned


@few
@given(st.integers(0, 3000), st.integers(10, 400), st.integers(0, 99))
def test_thinning_keeps_ends_and_spikes(size, limit, seed):
    values = np.random.default_rng(seed).normal(size=size)
    kept = thinned(values, limit)
    assert len(kept) <= limit
    assert np.all(np.diff(kept) > 0)
    if len(values):
        assert {0, len(values) - 1} <= set(kept.tolist())
        assert values[kept].max() == values.max()
        assert values[kept].min() == values.min()
    if len(values) <= limit:
        assert len(kept) == len(values)


def test_a_step_whose_time_is_not_known_stands_at_the_one_before():
    series = [(0, 0.1), (1, 0.5), (2, 0.6), (3, 0.0)]
    assert points(series, {1: 10.0, 2: 20.0})["seconds"] == [0.0, 10.0, 20.0, 20.0]
    assert points(series, {})["seconds"] == [0.0] * 4
