import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.engines.slots.kv_layout import Shapes
from turnwise.engines.slots.row_cache import FEWEST, SHORTEST, Shelves

SHAPES = Shapes(((1, 2), (2, 1)), {0: (0, 0), 1: (1, 0), 2: (0, 1)}, torch.float32, "cpu")
LONGEST = 100


def run_of(number, length):
    """States that can be recognised."""
    states = SHAPES.empty(length)
    for own in states:
        own.copy_(number + torch.arange(length)[:, None] / 1000)
    return states


def holds(shelves, slot, number, length):
    found, wanted = shelves.states(slot, 0, length), run_of(number, length)
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_sizes_double_up_to_the_longest():
    shelves = Shelves(SHAPES, LONGEST)
    assert [shelves.size_for(n) for n in (0, 1, 32, 33, 64, 65, 100)] == [32, 32, 32, 64, 64, 100, 100]
    assert Shelves(SHAPES, 10).size_for(10) == 10


def test_rows_begin_with_copies_of_their_pieces():
    shelves = Shelves(SHAPES, LONGEST)
    shelves.put(7, 40, [run_of(1, 10), run_of(2, 25)])
    first, second = shelves.states(7, 0, 10), shelves.states(7, 10, 35)
    assert all(torch.equal(one, other) for one, other in zip(first, run_of(1, 10), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(second, run_of(2, 25), strict=True))
    assert shelves.size_of(7) == 64


def test_shelves_give_their_memory_back():
    shelves = Shelves(SHAPES, LONGEST)
    for slot in range(5 * FEWEST):
        shelves.put(slot, 5)
    assert shelves.shelves[SHORTEST].num_rows == 8 * FEWEST
    for slot in range(5 * FEWEST - 1):
        shelves.drop(slot)
    assert shelves.shelves[SHORTEST].num_rows == FEWEST
    shelves.drop(5 * FEWEST - 1)
    assert shelves.shelves == {}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["put", "move", "drop"]), st.integers(0, 11), st.integers(1, 40))))
def test_every_row_stays_what_it_was(actions):
    shelves, known = Shelves(SHAPES, LONGEST), {}
    for what, slot, length in actions:
        if what == "put" and slot not in known:
            number = float(np.random.default_rng(len(known) + 100 * slot).integers(1000))
            known[slot] = number, length
            shelves.put(slot, length, [run_of(number, length)])
        elif what == "move" and slot in known and shelves.size_of(slot) < LONGEST:
            shelves.move(slot, shelves.size_of(slot) + 1)
        elif what == "drop" and slot in known:
            del known[slot]
            shelves.drop(slot)
        assert shelves.where.keys() == known.keys()
        assert all(holds(shelves, slot, *found) for slot, found in known.items())
        for size, shelf in shelves.shelves.items():
            assert [shelves.where[slot] for slot in shelf.slots] == [(size, row) for row in range(len(shelf.slots))]
