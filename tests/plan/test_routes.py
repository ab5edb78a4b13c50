"""Routes of nodes: the first turn that has one decides, in every layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.tries import prefixes_of, sequence, shared_turns
from support.making import few, make_turn
from support.mixture import with_random_routes
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.routes import NO_ROUTE, route_shares, routed_by, settle_routes
from turnwise.plan.rows import merge
from turnwise.plan.tree import tree

LAYOUTS = {
    "tree": lambda turns: [tree(turns)],
    "cut": lambda turns: cut(turns, 5),
    "packed": lambda turns: pack(turns, 40),
    "merged": lambda turns: merge(turns, 1000),
}


def one(*experts):
    """Routes of one layer with one expert per token."""
    return np.array(experts, np.uint8).reshape(-1, 1, 1)


def by_prefix(turns):
    """By the tokens up to a node: all routes that turns have for it, in the order of the turns."""
    found = {}
    for turn in turns:
        if turn.routes is None:
            continue
        tokens, first = sequence(turn), len(sequence(turn)) - 1 - len(turn.routes)
        for place, route in enumerate(turn.routes.tolist()):
            found.setdefault(tokens[: first + place + 1], []).append(route)
    return found


def as_sets(route):
    return [sorted(layer) for layer in route]


@few
@given(turns=shared_turns(max_turns=8), seed=st.integers(0, 9), layout=st.sampled_from(sorted(LAYOUTS)))
def test_a_node_has_the_route_of_the_first_turn_that_has_one(turns, seed, layout):
    turns = with_random_routes(turns, seed=seed)
    wanted = by_prefix(turns)
    for plan in LAYOUTS[layout](turns):
        if plan.routes is None:
            assert not wanted
            continue
        for node, prefix in enumerate(prefixes_of(plan)):
            row, routes = plan.routes.rows[node], wanted.get(prefix, [])
            assert (row == NO_ROUTE) == (not routes)
            if routes:
                assert plan.routes.table[row].tolist() == routes[0]
            assert plan.routes.shared[node] == (len(routes) > 1)
            assert plan.routes.disagreed[node] == (len({str(as_sets(route)) for route in routes}) > 1)


def test_a_prefix_has_its_routes_from_the_turn_before():
    """Only new tokens have routes in a turn, and a layout that shares nothing needs all of them."""
    first = make_turn([1, 2], [3, 4], routes=one(5, 6, 7))
    second = make_turn([1, 2, 3, 4, 9], [8], routes=one(0, 1))
    [plan] = pack([first, second], 100)
    assert plan.routes.table[plan.routes.rows[4:9]].ravel().tolist() == [5, 6, 7, 0, 1]
    assert plan.routes.rows[9] == NO_ROUTE, "nobody has read the last token"
    assert plan.routes.table[plan.routes.rows[:4]].ravel().tolist() == [5, 6, 7, 0], "the next prompt had read it"


def test_a_cut_takes_the_routes_of_turns_in_other_plans():
    stem = list(range(10, 20))
    turns = [
        make_turn(stem, [1, 2, 3, 4, 5, 6], routes=one(*range(15))),
        make_turn(stem, [7, 8, 9, 1, 2, 3], routes=one(*range(20, 25))),
    ]
    plans = cut(turns, 16)
    assert len(plans) == 2
    for plan in plans:
        at_stem = plan.routes.table[plan.routes.rows[:10]].ravel().tolist()
        assert at_stem == list(range(10))


def test_shares_say_what_was_replayed_and_where_turns_disagreed():
    turns = [
        make_turn([1, 2], [3], routes=one(4, 5)),
        make_turn([1, 2], [6], routes=one(4, 7)),
        make_turn([1, 2], [8]),
    ]
    plan = tree(turns)
    shares = route_shares([plan.routes])
    assert shares == {"routes/replayed": 2 / 5, "routes/disagreed": 1 / 2}
    assert route_shares([None, tree(turns[2:]).routes]) == {}
    assert route_shares([tree(turns[:1]).routes])["routes/disagreed"] == 0.0


def test_a_path_with_routes_of_other_turns_is_told():
    """An attempt's second turn, sampled by newer weights, begins with what older ones took."""
    turns = [
        make_turn([1, 2], [3], routes=one(4, 5)),
        make_turn([1, 2, 3, 9], [6], routes=one(1, 2)),
        make_turn([7], [8], routes=one(3)),
        make_turn([7], [9]),
    ]
    assert routed_by(turns, [True] * 4) == [True] * 4
    assert routed_by(turns, [False, True, True, True]) == [False, False, True, True]
    assert routed_by(turns, [True, True, False, True]) == [True, True, False, False]
    assert routed_by([turns[3]], [False]) == [True], "without routes there are none of others"


def test_the_order_in_which_a_router_took_experts_is_no_disagreement():
    both = [np.array([[[1, 2]]], np.uint8), np.array([[[2, 1]]], np.uint8)]
    turns = [make_turn([1], [token], routes=routes) for token, routes in enumerate(both, 5)]
    assert route_shares([tree(turns).routes])["routes/disagreed"] == 0.0


def test_routes_of_different_models_are_refused():
    turns = [make_turn([1], [2], routes=one(1)), make_turn([1], [2], routes=np.zeros((1, 2, 1), np.uint8))]
    with pytest.raises(ValueError, match="models with different layers"):
        settle_routes(turns)
    assert settle_routes([make_turn([1], [2])]) is None
