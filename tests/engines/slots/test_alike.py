import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.engines.slots.alike import FEWEST, LONGEST, MOST_PADDING, SPARE, PaddedRuns, grouped


@given(st.lists(st.integers(1, 2 * LONGEST), max_size=40))
def test_every_item_is_in_one_group_of_like_size_or_alone(sizes):
    groups, alone = grouped(range(len(sizes)), lambda item: sizes[item])
    assert sorted([*alone, *(item for group in groups for item in group)]) == list(range(len(sizes)))
    for group in groups:
        found = [sizes[item] for item in group]
        assert len(found) >= FEWEST
        assert max(found) <= min(LONGEST, MOST_PADDING * min(found) + SPARE)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6))
def test_what_is_padded_comes_back_in_the_order_of_the_index(spans):
    runs, start = [], 0
    for length, gap in spans:
        runs.append((start, start + length))
        start += length + gap
    padded = PaddedRuns.of(runs, "cpu")
    states = torch.arange(start * 6.0).view(start, 2, 3)
    placed = padded.pad(states)
    for row, (first, last) in enumerate(runs):
        torch.testing.assert_close(placed[row, :, : last - first].transpose(0, 1), states[first:last])
    out, first_numbers = padded.unpad(placed, placed[..., 0])
    assert padded.index.tolist() == [place for first, last in runs for place in range(first, last)]
    index = torch.from_numpy(np.asarray(padded.index))
    torch.testing.assert_close(out, states[index])
    torch.testing.assert_close(first_numbers, states[index][..., 0])
