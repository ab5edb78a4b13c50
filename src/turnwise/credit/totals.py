"""Estimators that give a whole attempt one advantage, from its total and those it is compared with.

Statistics are over trajectories, so that a ten-turn attempt counts once, and in float64; attempts whose totals are all
equal get exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.credit.returns import Array, Credit, Scores
from turnwise.types import Group

EPSILON = 1e-6


def grpo(groups: Sequence[Group], scores: Scores, *, norm_by_std: bool = True) -> Credit:
    """Totals against the group's mean, in units of its standard deviation; without them it is Dr. GRPO's."""
    return spread(groups, [standardise(t) if norm_by_std else centre(t) for t in totals_of(groups)])


def rloo(groups: Sequence[Group], scores: Scores) -> Credit:
    """Totals against the mean of the group's other attempts."""
    return spread(groups, [against_others(t) if len(t) > 1 else np.zeros_like(t) for t in totals_of(groups)])


def maxrl(groups: Sequence[Group], scores: Scores) -> Credit:
    """Totals against the group's mean, in units of that mean; for totals of 0 or more."""
    advantages = []
    for group, totals in zip(groups, totals_of(groups), strict=True):
        if len(totals) and totals.min() < 0.0:
            raise ValueError(
                f"credit maxrl needs totals of 0 or more, and an attempt at task {group.task.id} has "
                f"{totals.min():g}; raise its rewards, or use credit grpo"
            )
        advantages.append(centre(totals) / (totals.mean() + EPSILON) if len(totals) else totals)
    return spread(groups, advantages)


def reinforce(groups: Sequence[Group], scores: Scores) -> Credit:
    """Totals against the mean of all other trajectories of the step; a lone one keeps its total."""
    totals = totals_of(groups)
    everything = against_others(np.concatenate([np.zeros(0), *totals]))
    ends = np.cumsum([len(of_group) for of_group in totals])
    return spread(groups, [everything[end - len(t) : end] for end, t in zip(ends, totals, strict=True)])


def totals_of(groups: Sequence[Group]) -> list[Array]:
    """The totals of each group's attempts."""
    return [np.array([trajectory.total for trajectory in group.trajectories], np.float64) for group in groups]


def group_means(groups: Sequence[Group]) -> Array:
    """The mean total of each group: exactly that total where all are equal; 0 for a group without attempts."""
    return np.array([mean(totals) for totals in totals_of(groups)], np.float64)


def mean(values: Array) -> float:
    """The mean without the rounding that a sum of equal values has."""
    if len(values) == 0:
        return 0.0
    return float(values[0] if values.max() == values.min() else values.mean())


def centre(values: Array) -> Array:
    """Values minus their mean; exactly zero where all are equal, and for a lone one."""
    return values - mean(values)


def standardise(values: Array) -> Array:
    """Centred values in units of their unbiased standard deviation; a lone one is 0."""
    return centre(values) / (values.std(ddof=1) + EPSILON) if len(values) > 1 else np.zeros_like(values)


def against_others(values: Array) -> Array:
    """Each value minus the mean of the others, which is 0 where there are none."""
    n = len(values)
    return centre(values) * (n / (n - 1)) if n > 1 else values


def spread(groups: Sequence[Group], advantages: Sequence[Array]) -> Credit:
    """Each trajectory's advantage on every action token of every one of its turns."""
    return [
        np.full(len(turn.action), advantage)
        for group, of_group in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, of_group, strict=True)
        for turn in trajectory.turns
    ]
