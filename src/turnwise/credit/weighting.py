"""Weights: the share of every action token in the objective, from groups, before any layout exists.

The loss is a plain sum of weight times term, so rows, packing, cuts and ranks cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.types import Group, Turn, turns_of

Weights = list[NDArray[np.float64]]
"""One array per turn of `turns_of(groups)`."""
Weighting = Callable[..., Weights]


def token_mean(groups: Sequence[Group]) -> Weights:
    """Every token of the mini-batch counts the same."""
    return mean_over([list(turns_of(groups))])


def trajectory_mean(groups: Sequence[Group]) -> Weights:
    """Every trajectory counts the same, and every token within one."""
    return mean_over([trajectory.turns for group in groups for trajectory in group.trajectories])


def group_mean(groups: Sequence[Group]) -> Weights:
    """Every group counts the same, and every token within one."""
    return mean_over([list(turns_of([group])) for group in groups])


def turn_mean(groups: Sequence[Group]) -> Weights:
    """Every turn counts the same, and every token within one."""
    return mean_over([[turn] for turn in turns_of(groups)])


def constant(groups: Sequence[Group], *, length: int = 1024) -> Weights:
    """Every token counts one over `length` times the number of trajectories, so that long ones count more."""
    if length < 1:
        raise ValueError(f"weighting constant: length must be at least 1 (got {length})")
    sizes = [trajectory.num_action_tokens for group in groups for trajectory in group.trajectories]
    num_trained = max(1, sum(size > 0 for size in sizes))
    return [np.full(len(turn.action), 1.0 / (num_trained * length)) for turn in turns_of(groups)]


WEIGHTINGS: dict[str, Weighting] = {
    "token_mean": token_mean,
    "trajectory_mean": trajectory_mean,
    "group_mean": group_mean,
    "turn_mean": turn_mean,
    "constant": constant,
}


def mean_over(units: Sequence[Sequence[Turn]]) -> Weights:
    """Equal shares for the units that have tokens, and within each for its tokens."""
    sizes = [sum(len(turn.action) for turn in unit) for unit in units]
    num_trained = sum(size > 0 for size in sizes)
    return [
        np.full(len(turn.action), 1.0 / (num_trained * size) if size else 0.0)
        for unit, size in zip(units, sizes, strict=True)
        for turn in unit
    ]
