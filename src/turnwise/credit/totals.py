"""Estimators that give a whole attempt one advantage, from its total and those it is compared with.

Statistics are over trajectories, so a ten-turn attempt counts once, and in float64; attempts whose totals are all equal
get exactly zero. R is the total of an attempt: all of its rewards and its outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.credit.returns import Array, Credit, Scores
from turnwise.types import Group

EPSILON = 1e-6


def grpo(groups: Sequence[Group], scores: Scores, *, norm_by_std: bool = True) -> Credit:
    """Totals minus the group's mean, divided by its standard deviation; without `norm_by_std` only centred.

    A = (R - mean R) / (std R + 1e-6), std unbiased. GRPO, arXiv 2402.03300. Without the deviation it is Dr. GRPO, arXiv
    2503.20783, which shows that dividing favours tasks that are solved nearly always or hardly ever. Assumes groups of
    two or more attempts; a group of one gets 0.
    """
    return on_tokens(groups, [standardise(t) if norm_by_std else centre(t) for t in totals_of(groups)])


def rloo(groups: Sequence[Group], scores: Scores) -> Credit:
    """Totals minus the mean of the group's other attempts.

    A_i = R_i - mean_{j != i} R_j. RLOO, arXiv 2402.14740. The baseline does not depend on the attempt itself, so the
    gradient is unbiased. Assumes groups of two or more attempts; a group of one gets 0.
    """
    return on_tokens(groups, [against_others(t) if len(t) > 1 else np.zeros_like(t) for t in totals_of(groups)])


def maxrl(groups: Sequence[Group], scores: Scores) -> Credit:
    """Totals minus the group's mean, divided by that mean; for totals of 0 or more.

    A = (R - mean R) / (mean R + 1e-6). MaxRL, arXiv 2602.02710: with totals of 0 and 1 it approximates the gradient of
    the log probability of success, so rare successes count more. Refuses negative totals.
    """
    advantages = []
    for group, totals in zip(groups, totals_of(groups), strict=True):
        if len(totals) and totals.min() < 0.0:
            raise ValueError(
                f"credit maxrl needs totals of 0 or more, and an attempt at task {group.task.id} has "
                f"{totals.min():g}; raise its rewards, or use credit grpo"
            )
        advantages.append(centre(totals) / (totals.mean() + EPSILON) if len(totals) else totals)
    return on_tokens(groups, advantages)


def reinforce(groups: Sequence[Group], scores: Scores) -> Credit:
    """Totals minus the mean of all other trajectories of the step; a lone one keeps its total.

    A_i = R_i - mean_{j != i} R_j, j over the step. REINFORCE (Williams 1992) with a leave-one-out baseline. Assumes
    that tasks pay alike: otherwise the advantage also says how easy the task was.
    """
    totals = totals_of(groups)
    advantages = against_others(np.concatenate([np.zeros(0), *totals]))
    ends = np.cumsum([len(of_group) for of_group in totals])
    return on_tokens(groups, [advantages[end - len(t) : end] for end, t in zip(ends, totals, strict=True)])


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
    """Centred values divided by their unbiased standard deviation; a lone one is 0."""
    return centre(values) / (values.std(ddof=1) + EPSILON) if len(values) > 1 else np.zeros_like(values)


def against_others(values: Array) -> Array:
    """Each value minus the mean of the others, which is 0 if there are none."""
    n = len(values)
    return centre(values) * (n / (n - 1)) if n > 1 else values


def on_tokens(groups: Sequence[Group], advantages: Sequence[Array]) -> Credit:
    """Each trajectory's advantage on every action token of every one of its turns."""
    return [
        np.full(len(turn.action), advantage)
        for group, of_group in zip(groups, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, of_group, strict=True)
        for turn in trajectory.turns
    ]
