import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.making import few
from turnwise.view.curves import thinned


@few
@given(st.lists(st.floats(-1e6, 1e6), max_size=3000), st.integers(10, 400))
def test_thinning_keeps_ends_and_spikes(values, limit):
    values = np.array(values, np.float64)
    kept = thinned(values, limit)
    assert len(kept) <= limit
    assert np.all(np.diff(kept) > 0)
    if len(values):
        assert {0, len(values) - 1} <= set(kept.tolist())
        assert values[kept].max() == values.max()
        assert values[kept].min() == values.min()
    if len(values) <= limit:
        assert len(kept) == len(values)
