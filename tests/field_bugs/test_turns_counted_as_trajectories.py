"""Turns that were counted as trajectories.

Elsewhere metrics were means over the rows of a batch, and a row was a turn: an attempt of twelve turns counted twelve
times in the success rate, the mean reward and the number of attempts, in training and in validation.
"""

from dataclasses import replace

import pytest

from support.making import make_trajectory
from turnwise.evaluation.result import Result
from turnwise.runs.describe import describe
from turnwise.types import Group, Status, Task

LOST = make_trajectory([(3, 2)] * 12, rewards=[0.0] * 11 + [0.25], status=Status.too_many_turns)
WON = replace(make_trajectory([(3, 5)], outcome=1.0), marks={"lookups": 1.0})
GROUP = Group(Task("a", "test"), (replace(LOST, marks={"lookups": 12.0}), WON))


def in_training(groups):
    return describe(groups, (), version=0, success_at=1.0)


def in_validation(groups):
    return Result(tuple(groups), 1.0).metrics(0)


def check_attempts_count_once(measure):
    """An attempt of twelve turns and one of a single turn weigh the same in all that is said of attempts."""
    metrics = measure([GROUP])
    wanted = {
        "success": 0.5,
        "reward/mean": 0.625,
        "trajectory/count": 2.0,
        "trajectory/turns": 6.5,
        "trajectory/action_tokens": 14.5,
        "status/finished": 1.0,
        "status/too_many_turns": 1.0,
        "marks/lookups": 6.5,
    }
    wrong = {name: metrics[name] for name in wanted if metrics[name] != pytest.approx(wanted[name], abs=1e-12)}
    assert not wrong, f"turns were counted as attempts: {wrong}"
    assert metrics.get("attempts", 2) == 2
    assert metrics["turn/count"] == 13.0
    assert metrics["turn/action_tokens"] == pytest.approx(29 / 13)


def over_rows(measure):
    """The same metrics of rows: every turn stands for an attempt, with the reward of the whole."""

    def measured(groups):
        rows = [
            replace(group, trajectories=tuple(row for t in group.trajectories for row in rows_of(t)))
            for group in groups
        ]
        return measure(rows)

    return measured


def rows_of(trajectory):
    return [
        replace(trajectory, turns=(replace(turn, reward=0.0),), outcome=trajectory.total) for turn in trajectory.turns
    ]


@pytest.mark.parametrize("measure", [in_training, in_validation])
def test_an_attempt_counts_once(measure):
    check_attempts_count_once(measure)


@pytest.mark.parametrize("measure", [in_training, in_validation])
def test_means_over_rows_are_caught(measure):
    with pytest.raises(AssertionError, match="turns were counted as attempts: {'success': 0.0769"):
        check_attempts_count_once(over_rows(measure))
