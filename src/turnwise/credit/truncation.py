"""What becomes of attempts that were cut short: ended as too_many_turns, too_long or observation_too_large. They are
real outcomes and stay in the statistics of their group either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from turnwise.credit.weighting import Weighting, Weights
from turnwise.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Truncation:
    """How a run treats attempts that were cut short.

    Example:
        TRUNCATIONS["mask"].weigh(token_mean)(groups)
    """

    pay: Callable[[Sequence[Group]], Sequence[Group]]
    """The groups as estimators and filters shall see them."""
    weigh: Callable[[Weighting], Weighting]
    """The weighting as the loss shall use it."""


def is_truncated(trajectory: Trajectory) -> bool:
    return trajectory.status.cut_short


def as_paid(groups: Sequence[Group]) -> Sequence[Group]:
    """The same groups: a truncated attempt keeps what it earned."""
    return groups


def zeroed(groups: Sequence[Group]) -> list[Group]:
    """The same groups, turn by turn, in which no truncated attempt was paid anything."""
    return [
        replace(group, trajectories=tuple(unpaid(t) if is_truncated(t) else t for t in group.trajectories))
        for group in groups
    ]


def unpaid(trajectory: Trajectory) -> Trajectory:
    """The attempt without its rewards and its outcome."""
    return replace(trajectory, turns=tuple(replace(turn, reward=0.0) for turn in trajectory.turns), outcome=0.0)


def as_weighed(weigh: Weighting) -> Weighting:
    """The same weighting: truncated attempts train."""
    return weigh


def masked(weigh: Weighting) -> Weighting:
    """The weighting of the other attempts as if truncated ones were not there; those weigh 0, in their places."""

    def weigh_whole_attempts(groups: Sequence[Group]) -> Weights:
        whole = [
            replace(group, trajectories=tuple(t for t in group.trajectories if not is_truncated(t))) for group in groups
        ]
        weights = iter(weigh(whole))
        return [
            np.zeros(len(turn.action)) if is_truncated(trajectory) else next(weights)
            for group in groups
            for trajectory in group.trajectories
            for turn in trajectory.turns
        ]

    return weigh_whole_attempts


TRUNCATIONS: dict[str, Truncation] = {
    "train": Truncation(as_paid, as_weighed),
    "mask": Truncation(as_paid, masked),
    "zero": Truncation(zeroed, as_weighed),
}
