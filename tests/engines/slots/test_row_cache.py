from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.engines.slots import row_cache
from turnwise.engines.slots.kv_layout import KVLayout
from turnwise.engines.slots.row_cache import MIN_ROWS, MIN_SIZE, RowCache

LAYOUT = KVLayout(((1, 2), (2, 1)), {0: (0, 0), 1: (1, 0), 2: (0, 1)}, torch.float32, "cpu")
LONGEST = 100


def run_of(number, length):
    """States that can be recognised."""
    states = LAYOUT.empty(length)
    for own in states:
        own.copy_(number + torch.arange(length)[:, None] / 1000)
    return states


def holds(rows, slot, number, length):
    found, wanted = rows.states(slot, 0, length), run_of(number, length)
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_sizes_double_up_to_the_longest():
    rows = RowCache(LAYOUT, LONGEST)
    assert [rows.bucket_size(n) for n in (0, 1, 32, 33, 64, 65, 100)] == [32, 32, 32, 64, 64, 100, 100]
    assert RowCache(LAYOUT, 10).bucket_size(10) == 10


def test_rows_begin_with_copies_of_their_pieces():
    rows = RowCache(LAYOUT, LONGEST)
    rows.allocate(7, 40, [run_of(1, 10), run_of(2, 25)])
    first, second = rows.states(7, 0, 10), rows.states(7, 10, 35)
    assert all(torch.equal(one, other) for one, other in zip(first, run_of(1, 10), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(second, run_of(2, 25), strict=True))
    assert rows.row_size(7) == 64


def test_buckets_give_their_memory_back():
    rows = RowCache(LAYOUT, LONGEST)
    for slot in range(5 * MIN_ROWS):
        rows.allocate(slot, 5)
    assert rows.buckets[MIN_SIZE].num_rows == 8 * MIN_ROWS
    for slot in range(5 * MIN_ROWS - 1):
        rows.release(slot)
    rows.close_gaps()
    assert rows.buckets[MIN_SIZE].num_rows == MIN_ROWS
    rows.release(5 * MIN_ROWS - 1)
    rows.close_gaps()
    assert rows.buckets == {}


def test_rows_that_all_end_together_do_not_move_and_leave_their_memory_to_the_next(monkeypatch):
    rows = RowCache(LAYOUT, LONGEST)
    for slot in range(3 * MIN_ROWS):
        rows.allocate(slot, 40)
    memory = rows.buckets[64].states
    monkeypatch.setattr(row_cache, "copy_into", lambda *_: pytest.fail("a row was copied"))
    for slot in range(3 * MIN_ROWS):
        rows.release(slot)
    rows.close_gaps()
    assert rows.buckets == {}
    for slot in range(3 * MIN_ROWS):
        rows.allocate(slot, 50)
    assert rows.buckets[64].states is memory
    assert [rows.location[slot] for slot in range(3 * MIN_ROWS)] == [(64, row) for row in range(3 * MIN_ROWS)]


def test_a_new_bucket_has_memory_for_the_rows_that_are_likely(monkeypatch):
    rows = RowCache(LAYOUT, LONGEST)
    rows.num_likely = 5 * MIN_ROWS
    rows.allocate(0, 5)
    memory = rows.buckets[MIN_SIZE].states
    for slot in range(1, 5 * MIN_ROWS):
        rows.allocate(slot, 5)
    assert rows.buckets[MIN_SIZE].states is memory
    on_a_gpu = RowCache(replace(LAYOUT, device="cuda"), LONGEST)
    on_a_gpu.num_likely = 5 * MIN_ROWS
    assert on_a_gpu.first_rows() == MIN_ROWS


def test_memory_without_rows_goes_when_more_is_needed_or_when_it_is_much(monkeypatch):
    rows = RowCache(LAYOUT, LONGEST)

    def end(slot):
        rows.release(slot)
        rows.close_gaps()

    rows.allocate(0, 5)
    end(0)
    assert list(rows.spare) == [32]
    rows.allocate(0, 40)
    assert not rows.spare
    end(0)
    monkeypatch.setattr(row_cache, "MOST_SPARE", 0)
    assert list(rows.spare) == [64]
    rows.allocate(0, 40)
    end(0)
    assert not rows.spare


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "grow", "release", "close gaps"]), st.integers(0, 11), st.integers(1, 40)
        )
    )
)
def test_every_row_stays_what_it_was(actions):
    rows, known = RowCache(LAYOUT, LONGEST), {}
    for what, slot, length in actions:
        if what == "allocate" and slot not in known:
            number = float(np.random.default_rng(len(known) + 100 * slot).integers(1000))
            known[slot] = number, length
            rows.allocate(slot, length, [run_of(number, length)])
        elif what == "grow" and slot in known and rows.row_size(slot) < LONGEST:
            rows.grow(slot, rows.row_size(slot) + 1)
        elif what == "release" and slot in known:
            del known[slot]
            rows.release(slot)
        elif what == "close gaps":
            rows.close_gaps()
            for size, bucket in rows.buckets.items():
                places = [(size, row) for row in range(len(bucket.slots))]
                assert [rows.location[slot] for slot in bucket.slots] == places
        assert rows.location.keys() == known.keys()
        assert all(holds(rows, slot, *found) for slot, found in known.items())
