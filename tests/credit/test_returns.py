import math

import numpy as np
import pytest
from hypothesis import given

from credit.stepping import assert_close, fractions, many, nested, random_step, seeds, slow_rewards
from support.making import make_trajectory, make_turn
from turnwise.credit.returns import Decisions, make_timeline, policy_logprobs, read_scores, turn_payments
from turnwise.types import Group, Status, Task, Trajectory


def group_of(*trajectories):
    return Group(Task("task", "test"), trajectories)


@many
@given(seed=seeds)
def test_every_reward_lies_where_it_was_earned_and_none_is_lost(seed):
    groups = random_step(seed)
    timeline = make_timeline(groups)
    assert_close(
        groups,
        timeline.by_turn(timeline.tokens.rewards),
        [[slow_rewards(t) for t in group.trajectories] for group in groups],
    )
    for group, of_group in zip(groups, nested(groups, timeline.by_turn(timeline.tokens.rewards)), strict=True):
        for trajectory, of_attempt in zip(group.trajectories, of_group, strict=True):
            paid = sum(float(values.sum()) for values in of_attempt)
            assert paid == pytest.approx(trajectory.total if trajectory.num_action_tokens else 0.0, abs=1e-12)
            assert sum(map(sum, turn_payments(trajectory))) == pytest.approx(paid, abs=1e-12)
    assert timeline.turns.rewards.sum() == pytest.approx(timeline.tokens.rewards.sum(), abs=1e-12)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([2, 0, 0, 1], [[0.0, 1 + 2 + 4], [], [], [8 + 100]]),
        ([2, 1, 0], [[0.0, 1], [2 + 4 + 100], []]),
        ([0, 0, 3], [[], [], [1 + 2, 0.0, 4 + 100]]),
        ([0, 1], [[], [1 + 2 + 100]]),
        ([0, 2, 0], [[], [1, 2 + 4 + 100], []]),
        ([0], [[]]),
    ],
)
def test_an_empty_action_is_paid_with_the_token_before_it_or_else_the_token_after_it(sizes, expected):
    rewards = [1.0, 2.0, 4.0, 8.0][: len(sizes)]
    trajectory = make_trajectory([(1, size) for size in sizes], rewards=rewards, outcome=100.0)
    timeline = make_timeline([group_of(trajectory)])
    assert [values.tolist() for values in timeline.by_turn(timeline.tokens.rewards)] == expected
    assert timeline.turns.rewards.tolist() == [sum(values) for values in expected if values]


@many
@given(seed=seeds, factor=fractions)
def test_discounted_sums_are_what_they_say(seed, factor):
    timeline = make_timeline(random_step(seed))
    for decisions in (timeline.tokens, timeline.turns):
        values = np.random.default_rng(seed).normal(size=len(decisions.rewards))
        expected, total = [], 0.0
        for value, has_next in reversed(list(zip(values.tolist(), decisions.has_next.tolist(), strict=True))):
            total = value + factor * total if has_next else value
            expected.append(total)
        np.testing.assert_allclose(decisions.discounted_sums(values, factor), expected[::-1], rtol=1e-12, atol=1e-12)


def test_decisions_end_with_their_attempt():
    decisions = Decisions(np.zeros(4), np.array([True, False, True, False]))
    assert decisions.next_values(np.array([1.0, 2.0, 3.0, 4.0])).tolist() == [2.0, 0.0, 4.0, 0.0]
    assert decisions.discounted_sums(np.array([1.0, 2.0, 4.0, 8.0]), 0.5).tolist() == [2.0, 2.0, 8.0, 8.0]


def test_discounting_does_not_overflow_in_long_attempts():
    """0.9 ** -10000 is infinite; dividing by it was one way to vectorise this."""
    trajectory = make_trajectory([(1, 10_000), (1, 10_000)], outcome=1.0)
    tokens = make_timeline([group_of(trajectory)]).tokens
    found = tokens.discounted_sums(tokens.rewards, 0.9)
    np.testing.assert_allclose(found, 0.9 ** np.arange(20_000)[::-1], rtol=1e-9)


def test_undiscounted_sums_of_an_outcome_are_exact():
    tokens = make_timeline([group_of(make_trajectory([(1, 1000)] * 3, outcome=0.1))]).tokens
    assert set(tokens.discounted_sums(tokens.rewards, 1.0).tolist()) == {0.1}


def test_scores_are_read_in_float64_and_missed_in_one_line():
    groups = [group_of(make_trajectory([(1, 2), (1, 0), (1, 1)]))]
    found = read_scores(groups, {"values": [np.float32([1, 2]), np.float32([]), np.float32([3])]}, "values", "gae")
    assert found.dtype == np.float64
    assert found.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match=r'^credit gae needs scores\["values"\].*have them scored$'):
        read_scores(groups, {}, "values", "gae")
    with pytest.raises(AssertionError):
        read_scores(groups, {"values": [np.float32([1, 2, 3])]}, "values", "gae")


def test_without_scores_the_engines_logprobs_are_used():
    turn = make_turn([1], [2, 3], logprobs=[-1.0, -2.0])
    groups = [group_of(Trajectory((turn,), Status.finished))]
    assert policy_logprobs(groups, {}, "x").tolist() == [-1.0, -2.0]
    assert policy_logprobs(groups, {"old": [np.float32([-3, -4])]}, "x").tolist() == [-3.0, -4.0]
    unknown = [group_of(Trajectory((make_turn([1], [2, 3], logprobs=[-1.0, math.nan]),), Status.finished))]
    with pytest.raises(ValueError, match=r'NaN, as in demonstrations; give it scores\["old"\]$'):
        policy_logprobs(unknown, {}, "x")
    assert policy_logprobs(unknown, {"old": [np.float32([-3, -4])]}, "x").tolist() == [-3.0, -4.0]
