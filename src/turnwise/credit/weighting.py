"""The weightings that a recipe can name (`weighting.name`): the share of every action token in the objective.

Token weights come from groups, before any layout exists. The loss is a plain sum of token weight times term, so rows,
packing, cuts and ranks cannot change it. To add a weighting, write a function of groups and enter it in WEIGHTINGS.

Symbols: T_i action tokens of attempt i, N attempts that have any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate

import numpy as np
from numpy.typing import NDArray

from turnwise.types import Group, Turn, turns_of

TokenWeights = list[NDArray[np.float64]]
"""One array per turn of `turns_of(groups)`, one number per action token."""
WeighTokens = Callable[[Sequence[Group]], TokenWeights]
"""A weighting with its settings filled in."""


@dataclass(frozen=True, slots=True)
class Weighting:
    """A weighting and what it depends on.

    Example:
        Weighting(turn_mean, depends_on_turns=True)
    """

    function: Callable[Concatenate[Sequence[Group], ...], TokenWeights]
    """(groups, *, settings) -> token weights."""
    depends_on_turns: bool = False
    """Token weights change if an attempt's tokens are divided into turns in another way."""


def token_mean(groups: Sequence[Group]) -> TokenWeights:
    """Every token of the mini-batch counts the same.

    w = 1 / sum_i T_i. The token-level loss of DAPO (arXiv 2503.14476). A long attempt has a larger share.
    """
    return mean_over([list(turns_of(groups))])


def trajectory_mean(groups: Sequence[Group]) -> TokenWeights:
    """Every trajectory counts the same, and every token within one.

    w = 1 / (N T_i). The sequence mean of GRPO (arXiv 2402.03300). A token of a long attempt counts less, which Dr. GRPO
    (arXiv 2503.20783) describes as a bias towards long wrong answers.
    """
    return mean_over([trajectory.turns for group in groups for trajectory in group.trajectories])


def group_mean(groups: Sequence[Group]) -> TokenWeights:
    """Every group counts the same, and every token within one.

    w = 1 / (groups x action tokens of the group). A task with long attempts counts no more than one with short ones.
    """
    return mean_over([list(turns_of([group])) for group in groups])


def turn_mean(groups: Sequence[Group]) -> TokenWeights:
    """Every turn counts the same, and every token within one.

    w = 1 / (turns x action tokens of the turn). An attempt of many turns has a larger share.
    """
    return mean_over([[turn] for turn in turns_of(groups)])


def constant(groups: Sequence[Group], *, length: int = 1024) -> TokenWeights:
    """Every token counts one over `length` times the number of trajectories, so that long ones count more.

    w = 1 / (N length). The normalisation of Dr. GRPO (arXiv 2503.20783): it does not depend on how long attempts are.
    The token weights do not sum to 1, so `length` scales the gradient.
    """
    if length < 1:
        raise ValueError(f"weighting constant: length must be at least 1 (got {length})")
    sizes = [trajectory.num_action_tokens for group in groups for trajectory in group.trajectories]
    num_trained = max(1, sum(size > 0 for size in sizes))
    return [np.full(len(turn.action), 1.0 / (num_trained * length)) for turn in turns_of(groups)]


WEIGHTINGS: dict[str, Weighting] = {
    "token_mean": Weighting(token_mean),
    "trajectory_mean": Weighting(trajectory_mean),
    "group_mean": Weighting(group_mean),
    "turn_mean": Weighting(turn_mean, depends_on_turns=True),
    "constant": Weighting(constant),
}


def mean_over(units: Sequence[Sequence[Turn]]) -> TokenWeights:
    """Equal shares for the units that have tokens, and within each for its tokens."""
    sizes = [sum(len(turn.action) for turn in unit) for unit in units]
    num_trained = sum(size > 0 for size in sizes)
    return [
        np.full(len(turn.action), 1.0 / (num_trained * size) if size else 0.0)
        for unit, size in zip(units, sizes, strict=True)
        for turn in unit
    ]
