import pickle
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few, make_turn
from turnwise.allowed import LARGEST_SET, Allowed, bits_of, compress, decompress, join_allowed, pack_set
from turnwise.interop.skyrl import to_generator_output
from turnwise.runs.archive import Record, read_step, write_step
from turnwise.types import Group, Status, Task, Trajectory

sets = st.lists(st.sets(st.integers(0, 299)), min_size=1, max_size=5)


@few
@given(sets)
def test_sets_come_back_whatever_the_padding(given_sets):
    packed = [pack_set(tokens, 300 + 40 * place) for place, tokens in enumerate(given_sets)]
    allowed = Allowed(np.arange(len(packed)), packed)
    dense = allowed.dense(310)
    assert [set(np.flatnonzero(row).tolist()) for row in dense] == given_sets
    assert packed == [pack_set(tokens, 300) for tokens in given_sets]
    every = np.arange(310)
    for place, tokens in enumerate(given_sets):
        one = Allowed(np.full(310, place), packed)
        assert set(np.flatnonzero(one.allows(every)).tolist()) == tokens


def test_an_allowed_refuses_what_it_cannot_mean():
    with pytest.raises(ValueError, match="one of its turn's 1 sets"):
        Allowed([0, 1], [pack_set([1], 8)])
    with pytest.raises(ValueError, match="one of its turn's 1 sets"):
        Allowed([-1], [pack_set([1], 8)])
    with pytest.raises(ValueError, match="one set of allowed tokens per action token"):
        make_turn([1], [2, 3], allowed=Allowed([0], [pack_set([2], 8)]))


@pytest.mark.parametrize("size", [0, 50, LARGEST_SET + 9])
def test_a_damaged_or_oversized_set_is_refused(size):
    packed = compress(np.ones(size, np.uint8))
    packed = b"nonsense" if not size else packed if size > LARGEST_SET else packed[:-6]
    with pytest.raises(ValueError, match="set of allowed tokens"):
        decompress(packed)


def guided_attempts():
    """Attempts whose turns have sets, share some, and have none."""
    one, other, third = pack_set([3, 4, 5], 64), pack_set(range(40), 64), pack_set([7], 64)
    first = make_turn([1, 2], [3, 4], allowed=Allowed([0, 1], [one, other]))
    second = make_turn([1, 2, 3, 4, 9], [5, 7, 5], allowed=Allowed([1, 0, 1], [third, one]))
    plain = make_turn([1, 2, 3, 4, 9, 5, 7, 5], [8])
    nothing = make_turn([1, 2, 3, 4, 9, 5, 7, 5, 8], [])
    return [
        Trajectory((first, second, plain, nothing), Status.finished, 1.0),
        Trajectory((replace(plain, allowed=None),), Status.finished, 0.0),
        Trajectory((first,), Status.finished, 0.5),
    ]


def assert_alike(found, wanted):
    for one, other in zip(found.turns, wanted.turns, strict=True):
        assert (one.allowed is None) == (other.allowed is None)
        if other.allowed is not None:
            assert (one.allowed.dense(64) == other.allowed.dense(64)).all()
            assert not one.allowed.places.flags.writeable


def test_a_pickle_keeps_what_was_allowed_and_each_set_once():
    attempts = guided_attempts()
    for found, wanted in zip(pickle.loads(pickle.dumps(attempts)), attempts, strict=True):
        assert_alike(found, wanted)
    big = compress(np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8))
    turns = [make_turn([1] * (place + 1), [0], allowed=Allowed([0], [big])) for place in range(10)]
    size = len(pickle.dumps([Trajectory((turn,), Status.finished) for turn in turns]))
    assert size < 2 * len(big)


def test_the_archive_keeps_what_was_allowed_and_has_no_column_without(tmp_path):
    guided, plain, other = guided_attempts()
    groups = [Group(Task("a", "x"), (guided, plain)), Group(Task("b", "x"), (other,))]
    records = [Record(group, kept=False) for group in groups]
    path = write_step(tmp_path, 1, records)
    found = [record.group for record in read_step(path)]
    for one, wanted in zip(found, groups, strict=True):
        for attempt, other_attempt in zip(one.trajectories, wanted.trajectories, strict=True):
            assert_alike(attempt, other_attempt)
    without = write_step(tmp_path, 2, [Record(Group(Task("a", "x"), (plain,)), kept=False)])
    import pyarrow.parquet as pq

    assert {"allowed", "allowed_sets"} <= set(pq.read_schema(path).names)
    assert not {"allowed", "allowed_sets"} & set(pq.read_schema(without).names)
    assert read_step(without)[0].group.trajectories[0].turns[0].allowed is None


def test_other_systems_get_no_turn_that_a_grammar_guided():
    guided, plain, _ = guided_attempts()
    for attempts, refused in (((plain,), False), ((plain, guided), True)):
        with pytest.raises(ValueError, match="leave out") if refused else nullcontext():
            assert len(to_generator_output([Group(Task("a", "x"), attempts)])["response_ids"]) == 1


def test_bits_of_no_sets():
    assert bits_of([]).shape == (0, 0)


def test_runs_of_tokens_are_joined_with_their_sets():
    few, many = pack_set([1, 2], 64), pack_set(range(50), 64)
    parts = [Allowed([0, 1], (few, many)), Allowed([0], (many,)), Allowed([0, 0], (few,))]
    whole = join_allowed(parts, 4)
    assert whole.sets == (few, many)
    assert whole.places.tolist() == [0, 1, 1, 0]
    dense = np.concatenate([part.dense(64) for part in parts])
    assert np.array_equal(whole.dense(64), dense[:4])
