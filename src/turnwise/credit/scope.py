"""Scope: which tokens form a sequence, where a ratio is one of a sequence. A recipe names it, so no layout decides it.

A turn is one model call; a trajectory is all turns of an attempt, whatever its prompts kept of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.credit.returns import Array, Credit, concatenate
from turnwise.types import Group, turns_of

Scope = Literal["turn", "trajectory"]
PerTurn = Sequence[NDArray[Any]]
"""One array per turn of `turns_of(groups)`, one value or row per action token."""
Anchor = Callable[[Sequence[Group], PerTurn, Callable[[], PerTurn]], PerTurn]
"""(groups, old logprobs, a function that scores the present ones) -> the logprobs a loss compares the policy with."""

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to this size before they are exponentiated, so that no ratio overflows."""


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
        """[N] index of the token's sequence."""

    def sum(self, values: Array) -> Array:
        """[N] of [N]: the sum over each token's sequence."""
        if len(values) == 0:
            return values
        sums: Array = np.bincount(self.of_token, values).astype(np.float64)
        return sums[self.of_token]

    def mean(self, values: Array, counted: Array | None = None) -> Array:
        """[N] of [N]: the mean over the counted tokens of each token's sequence; 0 if none is counted."""
        counted = np.ones(len(values)) if counted is None else counted
        return self.sum(values * counted) / np.maximum(self.sum(counted), 1.0)

    def by_turn(self, values: Array) -> Credit:
        """[N] as one array per turn."""
        return np.split(values, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []


def anchor_tokens(groups: Sequence[Group], old: PerTurn, score_now: Callable[[], PerTurn]) -> PerTurn:
    """Every token is compared with its own old logprob."""
    return old


def anchor_sequences(
    groups: Sequence[Group], old: PerTurn, score_now: Callable[[], PerTurn], *, scope: Scope
) -> PerTurn:
    """Anchors that make each token's ratio that of its sequence: the geometric mean of the tokens' ratios.

    anchor_t = now_t - mean over the sequence of (now - old), so that exp(logprob_t - anchor_t) is GSPO's sequence ratio
    (arXiv 2507.18071). The ratio is a constant, computed before the gradient passes from logprobs scored without one;
    the gradient goes through the token's own logprob. A cut or a rank boundary through a sequence changes nothing.
    """
    now = score_now()
    if now is old:  # the weights have not changed since the old logprobs were scored: every ratio is 1
        return old
    sequences = Sequences(groups, scope)
    new, before = concatenate(now), concatenate(old)
    ratio = sequences.mean(np.clip(new - before, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return sequences.by_turn(new - ratio)
