import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.making import few, make_turn, trajectories
from turnwise.inspect.group_tree import group_tree
from turnwise.plan.tree import tree
from turnwise.types import Break, Status, Trajectory


def attempt(*turns):
    return Trajectory(tuple(make_turn(list(prompt), list(action)) for prompt, action in turns), Status.finished, 0.0)


def shown(node):
    return node.parent, node.start, node.tokens.tolist(), node.sampled, node.chains, node.num_uses


def test_attempts_share_the_prompt_and_part_where_they_sample_differently():
    one = attempt(([1, 2], [5]), ([1, 2, 5, 7], [8]))
    other = attempt(([1, 2], [5]), ([1, 2, 5, 7], [9]))
    third = attempt(([1, 2], [6]))
    found = group_tree([one, other, third])
    assert [(chain.attempt, chain.first_turn, chain.last_turn) for chain in found.chains] == [
        (0, 0, 1),
        (1, 0, 1),
        (2, 0, 0),
    ]
    assert list(map(shown, found.nodes)) == [
        (-1, 0, [1, 2], False, (0, 1, 2), 5),
        (0, 2, [5], True, (0, 1), 4),
        (1, 3, [7], False, (0, 1), 2),
        (2, 4, [8], True, (0,), 1),
        (2, 4, [9], True, (1,), 1),
        (0, 2, [6], True, (2,), 1),
    ]
    assert (found.unique_tokens, found.chain_tokens, found.turn_tokens) == (7, 13, 19)


def test_a_broken_prefix_begins_a_chain_and_says_why():
    turns = (
        make_turn([1, 2, 3], [4]),
        make_turn([1, 2, 9], [4], broke=Break.template),
        make_turn([1, 2, 9, 4], [5]),
    )
    found = group_tree([Trajectory(turns, Status.finished, 0.0)])
    assert [(chain.first_turn, chain.last_turn, chain.broke, chain.lost_tokens) for chain in found.chains] == [
        (0, 0, Break.none, 0),
        (1, 2, Break.template, 2),
    ]
    assert [node.tokens.tolist() for node in found.nodes] == [[1, 2], [3], [4], [9], [4], [5]]
    assert found.chains[1].turn_at(3) == 1
    assert found.chains[1].turn_at(4) == 2


def test_what_one_attempt_sampled_may_be_given_to_another():
    found = group_tree([attempt(([1], [2, 3])), attempt(([1, 2, 3], [4]))])
    assert [(node.tokens.tolist(), node.sampled) for node in found.nodes] == [
        ([1], False),
        ([2, 3], True),
        ([4], True),
    ]


def test_a_group_without_turns_has_no_nodes():
    found = group_tree([Trajectory((), Status.failed)])
    assert (found.nodes, found.chains, found.unique_tokens) == ((), (), 0)
    assert group_tree([]).nodes == ()


@few
@given(st.lists(trajectories(min_action=1), min_size=1, max_size=4))
def test_the_tree_has_the_tokens_of_every_turn_and_as_many_as_the_plan_of_training(attempts):
    found = group_tree(attempts)
    assert found.unique_tokens == len(tree([turn for one in attempts for turn in one.turns]).tokens)
    for place, chain in enumerate(found.chains):
        path = [node for node in found.nodes if place in node.chains]
        assert np.array_equal(np.concatenate([node.tokens for node in path]), chain.tokens)
        assert [node.start for node in path] == np.cumsum([0, *(len(node.tokens) for node in path[:-1])]).tolist()
    for place, node in enumerate(found.nodes):
        assert node.parent < place
        assert len(node.tokens)
    uses = sum(node.num_uses * len(node.tokens) for node in found.nodes)
    assert uses == found.turn_tokens
