"""What becomes of attempts that failed or timed out for good: they leave the group, or count and are paid a fixed sum,
so that a policy cannot escape a bad return by crashing its environment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from turnwise.types import LARGEST_PAY, Group, Status, Trajectory

OnFailure = Callable[..., Group]


def drop(group: Group) -> Group:
    """Failed attempts do not count."""
    return group


def pay(group: Group, *, value: float = 0.0) -> Group:
    """Attempts that failed or timed out after at least one turn count, and are paid `value` and nothing else."""
    if not abs(value) <= LARGEST_PAY:
        raise ValueError(f"rollout.on_failure: value must be a finite number up to {LARGEST_PAY:g} (got {value!r})")
    paid = tuple(counted(trajectory, value) for trajectory in group.failed if can_count(trajectory))
    rest = tuple(trajectory for trajectory in group.failed if not can_count(trajectory))
    return Group(group.task, (*group.trajectories, *paid), rest)


ON_FAILURE: dict[str, OnFailure] = {"drop": drop, "pay": pay}


def can_count(trajectory: Trajectory) -> bool:
    """Whether a failed attempt has something to train on; a first prompt that does not fit is nobody's failure."""
    return trajectory.status in (Status.failed, Status.timed_out) and len(trajectory.turns) > 0


def counted(trajectory: Trajectory, value: float) -> Trajectory:
    """A failed attempt as one that counts; how it really ended stays in a mark of that name."""
    return Trajectory(
        turns=tuple(replace(turn, reward=0.0) for turn in trajectory.turns),
        status=Status.penalised,
        outcome=value,
        marks={**trajectory.marks, str(trajectory.status): 1.0},
        failure=trajectory.failure,
    )
