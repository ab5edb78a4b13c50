"""A charge for diverging from the reference, taken from the rewards before anything is estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from turnwise.credit.returns import Scores, log_ratios, timeline
from turnwise.types import Group, Trajectory


def charged(groups: Sequence[Group], scores: Scores, kl: float) -> list[Group]:
    """The same groups, turn by turn, in which every turn is paid `kl` times its tokens' log ratios less.

    For estimators whose moments are turns or attempts; those that tell tokens apart take `kl` themselves.
    """
    ratios = timeline(groups).by_turn(log_ratios(groups, scores, kl, "of a charge"))
    charges = iter([kl * float(np.sum(of_turn)) for of_turn in ratios])
    return [replace(group, trajectories=tuple(less(t, charges) for t in group.trajectories)) for group in groups]


def less(trajectory: Trajectory, charges: Iterator[float]) -> Trajectory:
    """The attempt with its turns charged, in order."""
    return replace(
        trajectory, turns=tuple(replace(turn, reward=turn.reward - next(charges)) for turn in trajectory.turns)
    )
