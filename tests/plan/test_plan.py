import numpy as np
import pytest

from turnwise.plan.plan import Plan


def make_plan(tokens, parent, exit, turns, offsets, action_nodes):
    depth = []
    for above in parent:
        depth.append(0 if above < 0 else depth[above] + 1)
    return Plan(
        np.array(tokens, np.int32),
        np.array(depth, np.int32),
        np.array(parent, np.int32),
        np.array(exit, np.int32),
        np.array(turns),
        np.array(offsets),
        np.array(action_nodes),
    )


# 7 8 | 9 and 7 | 5, as two chains (prompt | action).
PACKED = make_plan([7, 8, 9, 7, 5], [-1, 0, 1, -1, 3], [3, 3, 3, 5, 5], [0, 1], [0, 1, 2], [2, 4])
# The same turns as a tree: 7 is shared. Turn 2 is turn 0 once more.
TREE = make_plan([7, 8, 9, 5], [-1, 0, 1, 0], [4, 3, 3, 4], [0, 1, 2], [0, 1, 2, 3], [2, 3, 2])


def test_the_example_of_the_docstring():
    assert PACKED.num_tokens == 5
    assert PACKED.depth.tolist() == [0, 1, 2, 0, 1]
    assert squares(PACKED) == [(3, 1), (2, 1)]


def squares(plan):
    [stretch] = plan.stretches
    return [(square.length, square.count) for square in stretch.blocks.squares]


def ancestors(plan, node):
    """The node and what is above it, by following parents."""
    found = set()
    while node >= 0:
        found.add(node)
        node = int(plan.parent[node])
    return found


@pytest.mark.parametrize("plan", [PACKED, TREE])
def test_a_token_attends_to_its_ancestors(plan):
    for node in range(plan.num_tokens):
        assert {j for j in range(plan.num_tokens) if j <= node < plan.exit[j]} == ancestors(plan, node)


def test_repeated_action_nodes_are_computed_once_and_found_by_all():
    [stretch] = TREE.stretches
    assert stretch.nodes.tolist() == [2, 3]
    assert stretch.nodes[stretch.inverse].tolist() == TREE.action_nodes.tolist()
    assert stretch.picked.tolist() == [0, 1, 2]


def test_chains_of_equal_length_that_stand_together_are_one_batch():
    lengths = [2, 2, 3, 2, 1, 1, 1]
    starts = np.cumsum([0, *lengths[:-1]])
    parent = [-1 if node in starts else node - 1 for node in range(sum(lengths))]
    plan = make_plan([1] * sum(lengths), parent, [0] * sum(lengths), [0], [0, 1], [1])
    assert squares(plan) == [(2, 2), (3, 1), (2, 1), (1, 3)]


def test_gather_follows_the_plans_turns():
    per_turn = [np.array([0.0, 0.5]), np.array([1.0]), np.zeros(0), np.array([3.0, 3.5])]
    plan = make_plan([1, 2, 3, 4], [-1, 0, 1, 2], [4, 4, 4, 4], [3, 1], [0, 2, 3], [1, 2, 3])
    assert plan.gather(per_turn).tolist() == [3.0, 3.5, 1.0]


def test_gather_of_no_turns_is_empty():
    assert make_plan([], [], [], [], [0], []).gather([np.array([1.0])]).shape == (0,)
