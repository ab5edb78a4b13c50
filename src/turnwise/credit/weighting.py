"""Weights: the share of every action token in the objective, from groups, before any layout exists.

The loss is a plain sum of weight times term, so rows, packing, cuts and ranks cannot change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.types import Group, turns_of

Weights = list[NDArray[np.float64]]
"""One array per turn of `turns_of(groups)`."""
Weighting = Callable[..., Weights]


def token_mean(groups: Sequence[Group]) -> Weights:
    """Every token of the mini-batch counts the same."""
    sizes = [len(turn.action) for turn in turns_of(groups)]
    total = max(1, sum(sizes))
    return [np.full(size, 1.0 / total) for size in sizes]


def trajectory_mean(groups: Sequence[Group]) -> Weights:
    """Every trajectory counts the same, and every token within one."""
    sizes = [trajectory.num_action_tokens for group in groups for trajectory in group.trajectories]
    num_trained = max(1, sum(size > 0 for size in sizes))
    shares = iter([1.0 / (num_trained * size) if size else 0.0 for size in sizes])
    weights: Weights = []
    for group in groups:
        for trajectory in group.trajectories:
            share = next(shares)
            weights.extend(np.full(len(turn.action), share) for turn in trajectory.turns)
    return weights


WEIGHTINGS: dict[str, Weighting] = {"token_mean": token_mean, "trajectory_mean": trajectory_mean}
