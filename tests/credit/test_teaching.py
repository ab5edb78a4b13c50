import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from credit.stepping import assert_close, many, random_scores, random_step, seeds
from support.making import make_turn
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.teaching import distill, imitate, none
from turnwise.types import Group, Status, Task, Trajectory, turns_of


@pytest.mark.parametrize("scored", [True, False])
@many
@given(seed=seeds)
def test_distill_is_teacher_minus_policy_on_every_token(scored, seed):
    """The policy as scored, else as the engine recorded it."""
    groups = random_step(seed)
    scores = random_scores(groups, seed)
    if not scored:
        del scores["old"]
    policy = iter(scores["old"] if scored else [turn.logprobs for turn in turns_of(groups)])
    teacher = iter(scores["teacher"])
    expected = [
        [
            [[float(t) - float(p) for t, p in zip(next(teacher), next(policy), strict=True)] for _ in trajectory.turns]
            for trajectory in group.trajectories
        ]
        for group in groups
    ]
    assert_close(groups, distill(groups, scores), expected)


def test_distill_refuses_unknown_logprobs():
    turn = make_turn([1], [2, 3], logprobs=[math.nan, math.nan])
    groups = [Group(Task("a", "b"), (Trajectory((turn,), Status.finished),))]
    teacher = [np.float32([-1, -1])]
    with pytest.raises(ValueError, match=r"^credit distill reads logprobs of the engine, and some are NaN"):
        distill(groups, {"teacher": teacher})
    assert distill(groups, {"teacher": teacher, "old": [np.float32([-2, -1])]})[0].tolist() == [1.0, 0.0]


def test_demonstrations_can_be_imitated_without_logprobs():
    turn = make_turn([1], [2, 3], logprobs=[math.nan, math.nan])
    assert imitate([Group(Task("a", "b"), (Trajectory((turn,), Status.finished),))], {})[0].tolist() == [1.0, 1.0]


def test_none_is_zero_on_every_token_and_reads_nothing():
    groups = random_step(3)
    assert [values.tolist() for values in none(groups, {})] == [[0.0] * len(turn.action) for turn in turns_of(groups)]


@many
@given(seed=seeds)
def test_estimators_without_reward_are_those_that_no_pay_changes(seed):
    groups = random_step(seed)
    scores = random_scores(groups, seed)
    doubled = [
        replace(group, trajectories=tuple(replace(t, outcome=2.0 * t.outcome + 1.0) for t in group.trajectories))
        for group in groups
    ]
    without_reward = [estimator.function for estimator in ESTIMATORS.values() if not estimator.reads_rewards]
    assert without_reward == [distill, none]
    for estimate in without_reward:
        pairs = zip(estimate(groups, scores), estimate(doubled, scores), strict=True)
        assert all(one.tolist() == other.tolist() for one, other in pairs)
