"""What a recipe can do with attempts that were cut short (`rollout.failures.on_truncation`): those that ended as
too_many_turns, too_long or observation_too_large. They are real outcomes and always stay in the statistics of their
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from turnwise.credit.weighting import TokenWeights, WeighTokens
from turnwise.types import Group, Trajectory


def as_paid(groups: Sequence[Group]) -> Sequence[Group]:
    """The same groups: a truncated attempt keeps what it earned."""
    return groups


def as_weighed(weigh: WeighTokens) -> WeighTokens:
    """The same weighting: truncated attempts train."""
    return weigh


@dataclass(frozen=True, slots=True)
class Truncation:
    """A way to treat attempts that were cut short.

    Example:
        TRUNCATIONS["mask"].weigh(token_mean)(groups)
    """

    pay: Callable[[Sequence[Group]], Sequence[Group]] = as_paid
    """Changes the groups before filters and estimators see them."""
    weigh: Callable[[WeighTokens], WeighTokens] = as_weighed
    """Changes the weighting before the loss uses it."""
    changes_rewards: bool = False
    """`pay` changes rewards, so estimators that read none would ignore it."""


def is_truncated(trajectory: Trajectory) -> bool:
    return trajectory.status.cut_short


def zero_rewards(groups: Sequence[Group]) -> list[Group]:
    """The same groups, turn by turn, in which truncated attempts are paid nothing."""
    return [
        replace(group, trajectories=tuple(unpaid(t) if is_truncated(t) else t for t in group.trajectories))
        for group in groups
    ]


def unpaid(trajectory: Trajectory) -> Trajectory:
    """The attempt without its rewards and its outcome."""
    return replace(trajectory, turns=tuple(replace(turn, reward=0.0) for turn in trajectory.turns), outcome=0.0)


def mask_truncated(weigh: WeighTokens) -> WeighTokens:
    """The weighting of the other attempts as if truncated ones were not there; tokens of those weigh 0."""

    def weigh_whole_attempts(groups: Sequence[Group]) -> TokenWeights:
        whole = [
            replace(group, trajectories=tuple(t for t in group.trajectories if not is_truncated(t))) for group in groups
        ]
        token_weights = iter(weigh(whole))
        return [
            np.zeros(len(turn.action)) if is_truncated(trajectory) else next(token_weights)
            for group in groups
            for trajectory in group.trajectories
            for turn in trajectory.turns
        ]

    return weigh_whole_attempts


TRUNCATIONS: dict[str, Truncation] = {
    "train": Truncation(),
    "mask": Truncation(weigh=mask_truncated),
    "zero": Truncation(pay=zero_rewards, changes_rewards=True),
}
