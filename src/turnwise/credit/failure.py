"""What a recipe can do with attempts that failed or timed out for good (`rollout.failures.on_failure.name`).

They leave the group, or they count and are paid a fixed sum, so that a policy cannot escape a bad return by crashing
its environment. To add a way, write a function of a group and enter it in ON_FAILURE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Concatenate

from turnwise.types import LARGEST_PAY, Group, Status, Trajectory


@dataclass(frozen=True, slots=True)
class OnFailure:
    """A way to treat failed attempts.

    Example:
        OnFailure(pay, counts_failures=True)
    """

    function: Callable[Concatenate[Group, ...], Group]
    """(group, *, settings) -> the group that filters and estimators see."""
    counts_failures: bool = False
    """Failed attempts count as attempts of the policy, so many of them are no sign of a broken environment."""


def drop(group: Group) -> Group:
    """Failed attempts leave the group."""
    return group


def pay(group: Group, *, value: float = 0.0) -> Group:
    """Attempts that failed or timed out after at least one turn count, and are paid `value` and nothing else."""
    if not abs(value) <= LARGEST_PAY:
        raise ValueError(
            f"rollout.failures.on_failure: value must be a finite number up to {LARGEST_PAY:g} (got {value!r})"
        )
    paid = tuple(penalised(trajectory, value) for trajectory in group.failed if can_count(trajectory))
    rest = tuple(trajectory for trajectory in group.failed if not can_count(trajectory))
    return Group(group.task, (*group.trajectories, *paid), rest)


ON_FAILURE: dict[str, OnFailure] = {"drop": OnFailure(drop), "pay": OnFailure(pay, counts_failures=True)}


def can_count(trajectory: Trajectory) -> bool:
    """Whether a failed attempt has something to train on; a first prompt that does not fit is not the policy's
    failure."""
    return trajectory.status in (Status.failed, Status.timed_out) and len(trajectory.turns) > 0


def penalised(trajectory: Trajectory, value: float) -> Trajectory:
    """A failed attempt as one that counts; a mark keeps how it really ended."""
    return Trajectory(
        turns=tuple(replace(turn, reward=0.0) for turn in trajectory.turns),
        status=Status.penalised,
        outcome=value,
        marks={**trajectory.marks, str(trajectory.status): 1.0},
        failure=trajectory.failure,
        seat=trajectory.seat,
        opening=trajectory.opening,
        tools=trajectory.tools,
    )
