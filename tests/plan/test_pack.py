import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.making import few, group_lists, make_turn, make_turns
from turnwise.plan.pack import fill, pack
from turnwise.types import turns_of


@st.composite
def packings(draw):
    """(turns, budget) of a mini-batch, with a budget that its longest trained turn just fits or more."""
    turns = list(turns_of(draw(group_lists(max_groups=3, max_turns=3))))
    trained = [len(turn.prompt) + len(turn.action) for turn in turns if len(turn.action)]
    longest = max(trained, default=1)
    return turns, draw(st.integers(longest, max(longest, sum(trained)) + 3))


def chains_of(plan):
    """(turn, its tokens by node, nodes of its action) for every turn of a plan."""
    for turn, start, end in zip(plan.turns, plan.offsets[:-1], plan.offsets[1:], strict=True):
        nodes = plan.action_nodes[start:end]
        chain, node = [], int(nodes[-1])
        while node >= 0:
            chain.append(node)
            node = int(plan.parent[node])
        yield int(turn), chain[::-1], nodes.tolist()


@few
@given(packings())
def test_every_turn_with_an_action_stands_in_exactly_one_plan(packing):
    turns, budget = packing
    plans = pack(turns, budget)
    placed = [turn for plan in plans for turn in plan.turns.tolist()]
    assert sorted(placed) == [place for place, turn in enumerate(turns) if len(turn.action)]
    for plan in plans:
        assert len(plan.turns)
        assert plan.offsets[-1] == len(plan.action_nodes) == len(set(plan.action_nodes.tolist()))
        for turn, chain, action in chains_of(plan):
            prompt_size = len(turns[turn].prompt)
            assert plan.tokens[chain].tolist() == [*turns[turn].prompt, *turns[turn].action]
            assert chain[prompt_size:] == action
            assert plan.depth[chain].tolist() == list(range(len(chain)))


@few
@given(packings())
def test_no_plan_is_over_the_budget_and_nothing_is_padded(packing):
    turns, budget = packing
    plans = pack(turns, budget)
    assert all(plan.num_tokens <= budget for plan in plans)
    assert sum(plan.num_tokens for plan in plans) == sum(len(t.prompt) + len(t.action) for t in turns if len(t.action))


@few
@given(packings())
def test_a_token_sees_its_own_chain_up_to_itself(packing):
    for plan in pack(*packing):
        for _, chain, _ in chains_of(plan):
            for place, node in enumerate(chain):
                visible = [j for j in range(plan.num_tokens) if j <= node < plan.exit[j]]
                assert visible == chain[: place + 1]


def squares_of(plan):
    [stretch] = plan.stretches
    assert stretch.blocks.rectangles == ()
    return [(square.length, square.count) for square in stretch.blocks.squares]


@few
@given(packings())
def test_chains_cover_the_plan_in_order(packing):
    for plan in pack(*packing):
        squares = squares_of(plan)
        lengths = [length for length, count in squares for _ in range(count)]
        assert lengths == [len(chain) for _, chain, _ in chains_of(plan)]
        assert sum(lengths) == plan.num_tokens
        assert all(one[0] != other[0] for one, other in itertools.pairwise(squares))


@few
@given(packings(), st.randoms(use_true_random=False))
def test_the_order_of_turns_changes_neither_sizes_nor_contents(packing, random):
    turns, budget = packing
    shuffled = list(turns)
    random.shuffle(shuffled)

    def layout(turns):
        return [squares_of(plan) for plan in pack(turns, budget)]

    def contents(turns):
        plans = pack(turns, budget)
        return sorted((plan.tokens[c].tolist(), len(a)) for plan in plans for _, c, a in chains_of(plan))

    assert layout(turns) == layout(shuffled)
    assert contents(turns) == contents(shuffled)


@few
@given(packings())
def test_there_are_as_few_plans_as_the_order_by_length_allows(packing):
    turns, budget = packing
    lengths = sorted(len(turn.prompt) + len(turn.action) for turn in turns if len(turn.action))
    fewest, room = 0, 0
    for length in lengths:  # taking as much as fits is optimal for consecutive parts
        if length > room:
            fewest, room = fewest + 1, budget
        room -= length
    assert len(pack(turns, budget)) == fewest


def test_plans_are_about_equally_full():
    turns = make_turns([(9, 1)] * 11, growing=False)
    assert [plan.num_tokens for plan in pack(turns, 100)] == [60, 50]


@pytest.mark.parametrize("budget", [1, 5])
def test_a_turn_over_the_budget_is_refused(budget):
    turns = [make_turn([1, 2], [3]), make_turn([1, 2, 3, 4], [5, 6])]
    with pytest.raises(ValueError, match=f"a turn has 6 tokens, more than {budget}; raise"):
        pack(turns, budget)
    assert [plan.num_tokens for plan in pack(turns, 6)] == [3, 6]


def test_empty_actions_are_left_out_whatever_their_prompt():
    turns = [make_turn([1] * 50, []), make_turn([1, 2], [3]), make_turn([4], [])]
    [plan] = pack(turns, 3)
    assert plan.turns.tolist() == [1]
    assert plan.tokens.tolist() == [1, 2, 3]
    assert pack([turns[0], turns[2]], 3) == []


def test_no_turns_make_no_plans():
    assert pack([], 8) == []


@few
@given(st.lists(st.integers(1, 9), max_size=30), st.integers(9, 60))
def test_fill_keeps_the_order(lengths, budget):
    order = np.random.default_rng(0).permutation(len(lengths))
    parts = fill(order, np.array(lengths, np.int64), budget)
    assert [place for part in parts for place in part] == order.tolist()
