"""Advantage estimators: pure functions of whole groups that return one array per turn, one number per action token.

Statistics are over trajectories, so that a ten-turn attempt counts once, and in float64; attempts whose totals are all
equal get exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.types import Group

Credit = list[NDArray[np.float64]]
"""One array per turn of `turns_of(groups)`."""
Scores = Mapping[str, Sequence[NDArray[np.float32]]]
"""By name (old, reference, teacher, values): one array per turn."""
Estimator = Callable[..., Credit]

EPSILON = 1e-6


def grpo(groups: Sequence[Group], scores: Scores, *, norm_by_std: bool = True) -> Credit:
    """Totals against the group's mean, in units of its standard deviation; without them it is Dr. GRPO's."""
    advantages = []
    for totals in totals_of(groups):
        centred = centre(totals)
        if norm_by_std and len(totals) > 1:
            centred = centred / (totals.std(ddof=1) + EPSILON)
        advantages.append(centred)
    return spread(groups, advantages)


def rloo(groups: Sequence[Group], scores: Scores) -> Credit:
    """Totals against the mean of the group's other attempts."""
    advantages = []
    for totals in totals_of(groups):
        n = len(totals)
        advantages.append(centre(totals) * (n / (n - 1) if n > 1 else 0.0))
    return spread(groups, advantages)


def reinforce(groups: Sequence[Group], scores: Scores) -> Credit:
    """Totals against the mean of all other trajectories of the step; a lone one keeps its total."""
    per_group = totals_of(groups)
    sizes = [len(totals) for totals in per_group]
    if not per_group:
        return []
    everything = np.concatenate(per_group)
    n = len(everything)
    advantages = centre(everything) * (n / (n - 1)) if n > 1 else everything
    return spread(groups, np.split(advantages, np.cumsum(sizes)[:-1]))


def imitate(groups: Sequence[Group], scores: Scores) -> Credit:
    """One for every token: demonstrations are all to be learned."""
    return spread(groups, [np.ones(len(group.trajectories)) for group in groups])


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "rloo": rloo, "reinforce": reinforce}


def totals_of(groups: Sequence[Group]) -> list[NDArray[np.float64]]:
    """The totals of each group's attempts."""
    return [np.array([trajectory.total for trajectory in group.trajectories], np.float64) for group in groups]


def centre(totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Totals minus their mean; exactly zero where all are equal, and for a lone attempt."""
    if len(totals) == 0 or totals.max() == totals.min():
        return np.zeros_like(totals)
    centred: NDArray[np.float64] = totals - totals.mean()
    return centred


def spread(groups: Sequence[Group], advantages: Sequence[NDArray[np.float64]]) -> Credit:
    """Each trajectory's advantage on every action token of every one of its turns."""
    return [
        np.full(len(turn.action), advantage)
        for group, of_group in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, of_group, strict=True)
        for turn in trajectory.turns
    ]
