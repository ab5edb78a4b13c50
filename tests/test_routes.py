"""Routes of turns: which tokens have one, and how small they stay."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few, make_turn, make_turns
from turnwise.routes import first_new, frozen_routes, pack_routes, route_dtype, unpack_routes
from turnwise.types import Status, Trajectory


def routes(count, layers=2, k=2, seed=0):
    return np.random.default_rng(seed).integers(0, 8, (count, layers, k)).astype(np.uint8)


def routed(turns):
    """The turns with routes of all tokens but the last, as an engine that is asked for all gives them."""
    return [
        make_turn(turn.prompt, turn.action, routes=routes(len(turn.prompt) + len(turn.action) - 1, seed=place))
        for place, turn in enumerate(turns)
    ]


def test_routes_are_read_only_and_of_8_bits_or_16():
    turn = make_turn([1, 2], [3], routes=[[[0, 7]], [[3, 255]]])
    assert turn.routes.dtype == np.uint8
    assert not turn.routes.flags.writeable
    assert make_turn([1, 2], [3], routes=[[[0, 256]]]).routes.dtype == np.uint16
    assert [route_dtype(number) for number in (8, 256, 257)] == [np.uint8, np.uint8, np.uint16]
    assert make_turn([1, 2], [3]).routes is None


@pytest.mark.parametrize("wrong", [[[0, 1]], [[[0.5]]], [[[-1]]], [[[1 << 16]]], np.zeros((1, 0, 2), np.uint8)])
def test_what_is_no_route_is_refused(wrong):
    with pytest.raises(ValueError, match=r"routes are|an expert has"):
        make_turn([1, 2], [3], routes=wrong)


def test_the_last_token_has_no_route():
    assert len(make_turn([1, 2], [3], routes=routes(2)).routes) == 2
    with pytest.raises(ValueError, match="3 tokens has no routes of 3"):
        make_turn([1, 2], [3], routes=routes(3))


def test_the_route_of_an_actions_last_token_comes_with_the_next_prompt():
    first = make_turn([1, 2], [3, 4], routes=routes(3))
    assert first_new(np.array([1, 2, 3, 4, 9]), first) == 3
    assert first_new(np.array([1, 2, 8, 4, 9]), first) == 2, "from the point of a break"
    assert first_new(np.array([7]), first) == 0
    assert first_new(np.array([1, 2, 3, 4, 9]), make_turn([1, 2], [3, 4])) == 0
    assert first_new(np.array([1, 2]), None) == 0


def test_a_trajectory_keeps_the_routes_of_new_tokens_only():
    whole = routed(make_turns([(5, 3), (2, 4), (1, 2)]))
    attempt = Trajectory(tuple(whole), Status.finished)
    assert [len(turn.routes) for turn in attempt.turns] == [7, 6, 3]
    for turn, engines in zip(attempt.turns, whole, strict=True):
        np.testing.assert_array_equal(turn.routes, engines.routes[len(engines.routes) - len(turn.routes) :])
    again = Trajectory(attempt.turns, Status.finished)
    assert [len(turn.routes) for turn in again.turns] == [7, 6, 3], "nothing is left out twice"


def test_a_broken_history_keeps_routes_from_the_break():
    first = make_turn([1, 2, 3], [4, 5], routes=routes(4))
    second = make_turn([1, 2, 9, 9, 9], [6], routes=routes(5, seed=1))
    attempt = Trajectory((first, second), Status.finished)
    assert len(attempt.turns[1].routes) == 3
    np.testing.assert_array_equal(attempt.turns[1].routes, second.routes[2:])


def test_a_turn_without_routes_costs_the_next_one_nothing():
    turns = routed(make_turns([(5, 3), (2, 4), (1, 2)]))
    plain = make_turn(turns[1].prompt, turns[1].action)
    attempt = Trajectory((turns[0], plain, turns[2]), Status.finished)
    assert attempt.turns[1].routes is None
    np.testing.assert_array_equal(attempt.turns[2].routes, turns[2].routes)


@few
@given(sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6), growing=st.booleans())
def test_a_pickle_gives_the_same_routes(sizes, growing):
    attempt = Trajectory(tuple(routed(make_turns(sizes, growing=growing))), Status.finished)
    back = pickle.loads(pickle.dumps(attempt))
    for turn, before in zip(back.turns, attempt.turns, strict=True):
        np.testing.assert_array_equal(turn.routes, before.routes)
        assert turn.routes.dtype == before.routes.dtype


def test_a_pickle_of_64_turns_stays_near_its_unique_bytes():
    """Qwen3-30B-A3B has 384 bytes of routes per token: 64 whole prompts would be 33 times as many."""
    turns = [
        make_turn(turn.prompt, turn.action, routes=routes(len(turn.prompt) + len(turn.action) - 1, 48, 8))
        for turn in make_turns([(20, 12)] * 64)
    ]
    attempt = Trajectory(tuple(turns), Status.finished)
    tokens = len(attempt.buffer)
    unique = tokens * 4 + (tokens - 1) * 48 * 8 + attempt.num_action_tokens * 8
    assert sum(turn.routes.nbytes for turn in attempt.turns) == (tokens - 1) * 48 * 8  # type: ignore[misc]
    assert len(pickle.dumps(attempt)) < 1.2 * unique
    back = pickle.loads(pickle.dumps(attempt))
    assert len({id(turn.routes.base) for turn in back.turns}) == 1, "views of one buffer"


def test_packing_tells_no_routes_from_routes_of_no_token():
    turns = [make_turn([1], [2]), make_turn([1], [2], routes=routes(0)), make_turn([1], [2], routes=routes(1))]
    found = unpack_routes(*pack_routes(turns))
    assert [None if part is None else len(part) for part in found] == [None, 0, 1]
    assert unpack_routes(*pack_routes(turns[:1])) == [None]


def test_frozen_routes_are_taken_as_they_are():
    frozen = frozen_routes(routes(3))
    assert frozen_routes(frozen) is frozen
