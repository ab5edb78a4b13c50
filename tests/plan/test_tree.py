import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.tries import EDGE_IDS, actions_of, assert_lays_out, sequence, shared_turns, trained
from support.making import few, lines_run, make_turn, make_turns
from turnwise.plan.cut import cut
from turnwise.plan.tree import tree
from turnwise.tokens import common_prefix

many = settings(max_examples=200, deadline=None)


# ---------------------------------------------------------------- against a trie


@many
@given(shared_turns())
def test_a_tree_is_the_trie_of_its_turns(turns):
    assert_lays_out(tree(turns), turns, trained(turns))


@few
@given(shared_turns(max_turns=20, max_size=10))
def test_a_larger_tree_is_the_trie_of_its_turns(turns):
    assert_lays_out(tree(turns), turns, trained(turns))


@few
@given(shared_turns(alphabet=EDGE_IDS))
def test_token_ids_go_to_the_edge_of_their_type(turns):
    assert_lays_out(tree(turns), turns, trained(turns))


@many
@given(shared_turns(), st.randoms(use_true_random=False))
def test_the_order_of_turns_changes_nothing_but_their_names(turns, random):
    order = list(range(len(turns)))
    random.shuffle(order)
    straight, shuffled = tree(turns), tree([turns[place] for place in order])
    for name in ("tokens", "depth", "parent", "exit"):
        assert getattr(straight, name).tolist() == getattr(shuffled, name).tolist()
    assert actions_of(straight) == {order[turn]: nodes for turn, nodes in actions_of(shuffled).items()}


@pytest.mark.parametrize("seed", range(3))
def test_a_rollout_of_groups_is_the_trie_of_its_turns(seed):
    """Attempts that share their task, with growing and with windowed histories."""
    random = np.random.default_rng(seed)
    turns = []
    for _ in range(3):
        task = random.integers(0, 9, 6)
        for _ in range(3):
            for turn in make_turns([(2, 3), (1, 2), (3, 4)], growing=bool(random.integers(2)), seed=random.integers(9)):
                turns.append(make_turn([*task, *turn.prompt % 3], turn.action % 3))
    assert_lays_out(tree(turns), turns, trained(turns))


# ---------------------------------------------------------------- examples


def lists(plan):
    names = ("tokens", "depth", "parent", "exit", "turns", "offsets", "action_nodes")
    return tuple(getattr(plan, name).tolist() for name in names)


def test_two_turns_that_part():
    plan = tree([make_turn([7, 8], [9]), make_turn([7], [5])])
    assert lists(plan) == ([7, 8, 9, 5], [0, 1, 2, 1], [-1, 0, 1, 0], [4, 3, 3, 4], [0, 1], [0, 1, 2], [2, 3])


def test_no_turns_and_turns_without_actions_make_an_empty_plan():
    for turns in ([], [make_turn([1, 2], [])], [make_turn([1], []), make_turn([1], [])]):
        plan = tree(turns)
        assert lists(plan) == ([], [], [], [], [], [0], [])
        assert plan.stretches == ()


def test_a_turn_without_an_action_adds_nothing_though_it_is_longer():
    plan = tree([make_turn([1, 2, 3, 4], []), make_turn([1, 2], [3])])
    assert plan.tokens.tolist() == [1, 2, 3]
    assert plan.turns.tolist() == [1]


def test_one_turn_is_a_chain():
    plan = tree([make_turn([4], [5, 6])])
    assert lists(plan) == ([4, 5, 6], [0, 1, 2], [-1, 0, 1], [3, 3, 3], [0], [0, 2], [1, 2])


def test_duplicates_share_every_node():
    plan = tree([make_turn([4], [5, 6])] * 3)
    assert plan.tokens.tolist() == [4, 5, 6]
    assert actions_of(plan) == {0: [1, 2], 1: [1, 2], 2: [1, 2]}


def test_the_same_tokens_may_be_prompt_here_and_action_there():
    plan = tree([make_turn([4, 5], [6]), make_turn([4], [5, 6]), make_turn([4, 5, 6], [7])])
    assert plan.tokens.tolist() == [4, 5, 6, 7]
    assert actions_of(plan) == {0: [2], 1: [1, 2], 2: [3]}


def test_a_turn_that_is_a_prefix_of_others_adds_nothing():
    plan = tree([make_turn([1], [2]), make_turn([1, 2], [3]), make_turn([1, 2], [4])])
    assert plan.tokens.tolist() == [1, 2, 3, 4]
    assert actions_of(plan) == {0: [1], 1: [2], 2: [3]}


def test_disjoint_roots_make_a_forest():
    plan = tree([make_turn([1], [2]), make_turn([2], [2]), make_turn([3], [2, 2])])
    assert plan.tokens.tolist() == [3, 2, 2, 1, 2, 2, 2]
    assert plan.parent.tolist() == [-1, 0, 1, -1, 3, -1, 5]


def test_an_action_that_begins_alike_parts_within_the_action():
    plan = tree([make_turn([1], [2, 3, 4]), make_turn([1], [2, 3, 5, 6])])
    assert plan.tokens.tolist() == [1, 2, 3, 5, 6, 4]
    assert actions_of(plan) == {0: [1, 2, 5], 1: [1, 2, 3, 4]}


def test_values_have_the_types_a_plan_promises():
    for turns in ([], [make_turn([4], [5, 6])]):
        plan = tree(turns)
        assert {getattr(plan, name).dtype for name in ("tokens", "depth", "parent", "exit")} == {np.dtype(np.int32)}
        assert {getattr(plan, name).dtype for name in ("turns", "offsets", "action_nodes")} == {np.dtype(np.int64)}


@few
@given(*[st.lists(st.integers(0, 1), max_size=5)] * 2)
def test_common_counts_equal_beginnings(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert common_prefix(np.array(one, np.int32), np.array(other, np.int32)) == count


# ---------------------------------------------------------------- heavy first


@many
@given(shared_turns(max_turns=12))
def test_the_largest_subtree_continues_the_chain(turns):
    plan = tree(turns)
    children = {}
    for node, above in enumerate(plan.parent.tolist()):
        children.setdefault(above, []).append(node)
    for above, nodes in children.items():
        assert nodes[0] == above + 1
        sizes = [int(plan.exit[node]) - node for node in nodes]
        assert sizes == sorted(sizes, reverse=True)


@few
@given(shared_turns(max_turns=40))
def test_a_path_leaves_few_chains(turns):
    """Every step off a chain at least halves what is below, so a token is in few rectangles."""
    plan = tree(turns)
    steps = []
    for node, above in enumerate(plan.parent.tolist()):
        steps.append(0 if above < 0 else steps[above] + (above != node - 1))
    assert all(step <= math.log2(plan.num_tokens) for step in steps)
    for stretch in plan.stretches:
        counts = np.zeros(plan.num_tokens, int)
        for rectangle in stretch.blocks.rectangles:
            counts[rectangle.start : rectangle.end] += 1
        assert counts.tolist() == steps


def test_a_comb_is_one_chain_with_short_branches():
    """Light children first would make a chain of every tooth: the order is by size, not by token."""
    turns = [make_turn([9] * size, [0]) for size in range(1, 20)]
    [stretch] = tree(turns).stretches
    assert stretch.blocks.squares[0].length == 20
    assert len(stretch.blocks.rectangles) == 18
    assert {rectangle.end - rectangle.start for rectangle in stretch.blocks.rectangles} == {1}


# ---------------------------------------------------------------- work


@settings(max_examples=20, deadline=None)
@given(shared_turns(min_turns=1, min_action=1), st.integers(2, 20))
def test_python_loops_over_turns_and_not_over_tokens(turns, budget):
    """The same tree with every token a hundred times takes exactly the same lines."""
    longer = [make_turn(np.repeat(turn.prompt, 100), np.repeat(turn.action, 100)) for turn in turns]
    assert len(sequence(longer[0])) == 100 * len(sequence(turns[0]))
    assert lines_run(lambda: tree(longer)) == lines_run(lambda: tree(turns))
    assert lines_run(lambda: cut(longer, 100 * budget)) == lines_run(lambda: cut(turns, budget))
