import itertools
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.tries import ancestors_of, shared_turns
from support.making import few, make_turn, make_turns
from turnwise.plan.blocks import Blocks, Rectangle, Square, blocks_of
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.plan.tree import tree

many = settings(max_examples=200, deadline=None)


def pairs_of(blocks):
    """Every (query, key), and how many blocks have it."""
    found = Counter()
    for square in blocks.squares:
        for start in range(square.start, square.end, square.length):
            found.update((start + i, start + j) for i in range(square.length) for j in range(i + 1))
    for block in blocks.rectangles:
        found.update(itertools.product(range(block.start, block.end), range(block.first_key, block.end_key)))
    return found


def wanted_pairs(plan, start, end):
    above = ancestors_of(plan)
    return Counter((query, key) for query in range(start, end) for key in above[query])


def blocks_between(plan, start, end):
    return blocks_of(plan.parent, plan.exit, start, end)


def check_stretch(plan, start, end):
    blocks = blocks_between(plan, start, end)
    assert pairs_of(blocks) == wanted_pairs(plan, start, end)
    assert blocks.num_pairs == int((plan.depth[start:end] + 1).sum())
    nodes = [node for square in blocks.squares for node in range(square.start, square.end)]
    assert nodes == list(range(start, end)), "every query is in exactly one square, in order"
    assert all(one.length != other.length for one, other in itertools.pairwise(blocks.squares))
    return blocks


@many
@given(shared_turns(min_turns=1, min_action=1, max_turns=12))
def test_blocks_of_a_tree_are_every_token_and_its_ancestors_once(turns):
    plan = tree(turns)
    blocks = check_stretch(plan, 0, plan.num_tokens)
    assert blocks.num_pairs == plan.num_pairs == int((plan.depth + 1).sum())
    assert plan.stretches[0].blocks == blocks


@many
@given(shared_turns(min_turns=1, min_action=1, max_turns=12), st.data())
def test_blocks_of_any_stretch_are_its_tokens_and_their_ancestors_once(turns, data):
    plan = tree(turns)
    start = data.draw(st.integers(0, plan.num_tokens))
    check_stretch(plan, start, data.draw(st.integers(start, plan.num_tokens)))


@few
@given(shared_turns(min_turns=1, min_action=1), st.lists(st.integers(0, 60), max_size=5))
def test_stretches_one_after_another_have_all_pairs(turns, edges):
    plan = tree(turns)
    edges = sorted({0, plan.num_tokens, *(edge for edge in edges if edge < plan.num_tokens)})
    stretches = [blocks_between(plan, start, end) for start, end in itertools.pairwise(edges)]
    assert sum((pairs_of(blocks) for blocks in stretches), Counter()) == wanted_pairs(plan, 0, plan.num_tokens)


@few
@given(shared_turns(min_turns=1, min_action=1))
def test_a_forest_in_any_order_has_the_same_pairs(turns):
    """Nothing rests on heavy chains coming first: light ones first make more blocks of the same pairs."""
    plan = tree(turns)
    light = light_first(plan)
    check_stretch(light, 0, light.num_tokens)
    middle = light.num_tokens // 2
    check_stretch(light, 0, middle)
    check_stretch(light, middle, light.num_tokens)


def light_first(plan):
    """The same forest, the last child of every node visited first."""
    order, parent = [], []
    children = {}
    for node, above in enumerate(plan.parent.tolist()):
        children.setdefault(above, []).append(node)
    exits = {}

    def visit(node, above):
        place = len(order)
        order.append(node)
        parent.append(above)
        for child in reversed(children.get(node, [])):
            visit(child, place)
        exits[place] = len(order)

    for root in reversed(children[-1]):
        visit(root, -1)
    return Plan(
        plan.tokens[order],
        plan.depth[order],
        np.array(parent, np.int32),
        np.array([exits[place] for place in range(len(order))], np.int32),
        np.zeros(0, np.int64),
        np.zeros(1, np.int64),
        np.zeros(0, np.int64),
    )


# ---------------------------------------------------------------- examples


def test_the_example_of_the_docstring():
    [stretch] = tree([make_turn([7, 8], [5]), make_turn([7, 8], [9])]).stretches
    wanted = Blocks((Square(0, 3, 1), Square(3, 1, 1)), (Rectangle(3, 4, 0, 2),))
    assert (stretch.blocks.squares, stretch.blocks.rectangles) == (wanted.squares, wanted.rectangles)


def test_all_that_leaves_a_chain_at_one_node_is_one_rectangle():
    [stretch] = tree([make_turn([1, 2], [token, token]) for token in (3, 4, 5, 6)]).stretches
    assert stretch.blocks.squares == (Square(0, 4, 1), Square(4, 2, 3))
    assert stretch.blocks.rectangles == (Rectangle(4, 10, 0, 2),)


def test_a_chain_that_goes_on_sees_its_beginning_as_a_rectangle():
    [plan] = pack(make_turns([(6, 4)]), 100)
    assert blocks_between(plan, 4, 7) == Blocks((Square(4, 3, 1),), (Rectangle(4, 7, 0, 4),))


def test_a_stretch_that_begins_with_a_chain_carries_nothing():
    [plan] = pack(make_turns([(2, 1), (2, 1)], growing=False), 100)
    assert blocks_between(plan, 3, 6) == Blocks((Square(3, 3, 1),), ())


def test_an_empty_stretch_has_no_blocks():
    [plan] = pack(make_turns([(2, 1)]), 100)
    for place in range(4):
        assert blocks_between(plan, place, place) == Blocks((), ())
    assert blocks_between(tree([]), 0, 0) == Blocks((), ())
