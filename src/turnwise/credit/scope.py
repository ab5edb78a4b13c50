"""Scope: what a sequence is where a ratio is one of a sequence. Said by name, so that no layout can decide it.

A turn is one model call; a trajectory is all turns of an attempt, whatever its prompts kept of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.credit.returns import Array, Credit, joined
from turnwise.types import Group, turns_of

Scope = Literal["turn", "trajectory"]
PerTurn = Sequence[NDArray[Any]]
Anchor = Callable[[Sequence[Group], PerTurn, Callable[[], PerTurn]], PerTurn]
"""(groups, old logprobs, a function that scores the present ones) -> what a loss shall compare the policy with."""

LOG_RATIO_LIMIT = 20.0


class Sequences:
    """The sequences that the action tokens of some groups belong to.

    Example:
        Sequences(groups, "trajectory").mean(log_ratios)
    """

    def __init__(self, groups: Sequence[Group], scope: Scope) -> None:
        if scope not in ("turn", "trajectory"):
            raise ValueError(f'scope = {scope!r}: write "turn" or "trajectory"')
        self.sizes = np.array([len(turn.action) for turn in turns_of(groups)], np.int64)
        counts = [len(trajectory.turns) for group in groups for trajectory in group.trajectories]
        of_turn = np.arange(len(self.sizes)) if scope == "turn" else np.repeat(np.arange(len(counts)), counts)
        self.of_token = np.repeat(of_turn, self.sizes)
        """[N] which sequence."""

    def sum(self, values: Array) -> Array:
        """[N] of [N]: each token's sequence's sum."""
        if len(values) == 0:
            return values
        sums: Array = np.bincount(self.of_token, values).astype(np.float64)
        return sums[self.of_token]

    def mean(self, values: Array, counted: Array | None = None) -> Array:
        """[N] of [N]: each token's sequence's mean over the tokens that are counted; 0 where none is."""
        counted = np.ones(len(values)) if counted is None else counted
        return self.sum(values * counted) / np.maximum(self.sum(counted), 1.0)

    def by_turn(self, values: Array) -> Credit:
        """[N] as one array per turn."""
        return np.split(values, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []


def of_tokens(groups: Sequence[Group], old: PerTurn, now: Callable[[], PerTurn]) -> PerTurn:
    """Every token is compared with its own old logprob."""
    return old


def of_sequences(groups: Sequence[Group], old: PerTurn, now: Callable[[], PerTurn], *, scope: Scope) -> PerTurn:
    """Anchors against which each token's ratio is that of its sequence: the geometric mean of the tokens' ratios.

    The ratio is a constant, computed before the gradient passes from logprobs scored without one; the gradient goes
    through the token's own logprob. A cut or a rank boundary through a sequence then changes nothing.
    """
    present = now()
    if present is old:  # nothing has moved since the old logprobs were scored: every ratio is 1
        return old
    sequences = Sequences(groups, scope)
    new, before = joined(present), joined(old)
    ratio = sequences.mean(np.clip(new - before, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return sequences.by_turn(new - ratio)
