"""Rewards over time: when each reward of an attempt is paid, and discounted sums of what is paid afterwards.

A decision is an action token, or a turn that has any. A turn without tokens is no decision, because the policy chose
nothing in it: its reward counts with the last token before it or, where nothing was sampled yet, with the first token
after it. So no reward is lost, and the rewards of an attempt's decisions add up to its total.

Letters: U turns, M turns that have tokens, N action tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from turnwise.types import Group, Trajectory, turns_of

Array = NDArray[np.float64]
Credit = list[Array]
"""One array per turn of `turns_of(groups)`."""
Scores = Mapping[str, Sequence[NDArray[np.float32]]]
"""By name (old, reference, teacher, values): one array per turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """The decisions of all attempts, one attempt after another: all by token, or all by turn.

    Example:
        Decisions(rewards=np.array([0.0, 1.0, 0.5]), has_next=np.array([True, False, False]))   two decisions, then one
    """

    rewards: Array
    """What each decision is paid."""
    has_next: NDArray[np.bool_]
    """Whether another decision of the same attempt follows."""

    def next_values(self, values: Array) -> Array:
        """The value of the decision after each; 0 after an attempt's last."""
        return np.where(self.has_next, np.roll(values, -1), 0.0)

    def discounted_sums(self, values: Array, factor: float) -> Array:
        """values[i] + factor * values[i + 1] + factor**2 * values[i + 2] ..., to the end of the attempt.

        By doubling: pass j adds to each decision the sum that begins 2**j decisions later. That is log n passes of
        numpy, without the division by powers of the factor that overflows in long attempts.
        """
        sums = np.array(values, np.float64)
        decay = factor * self.has_next
        distance = 1
        while decay.any():
            sums[:-distance] += decay[:-distance] * sums[distance:]
            decay[:-distance] *= decay[distance:]
            distance *= 2
        return sums


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The turns of a step that have tokens, in the order of `turns_of(groups)`, and what is paid in them.

    Example:
        make_timeline(groups).turns.rewards
    """

    sizes: NDArray[np.int64]
    """[U] action tokens of every turn, also of those without any."""
    groups: NDArray[np.int64]
    """[M] index of the group in the step."""
    attempts: NDArray[np.int64]
    """[M] index of the attempt in the step."""
    turn_indices: NDArray[np.int64]
    """[M] how many turns of the attempt that have tokens came before."""
    paid_first: Array
    """[M] paid before anything was sampled: counts with the turn's first token."""
    paid_last: Array
    """[M] counts with the turn's last token."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[M] action tokens."""
        return self.sizes[self.sizes > 0]

    @property
    def turns(self) -> Decisions:
        """The decisions by turn."""
        last = np.append(self.attempts[1:] != self.attempts[:-1], True)[: len(self.attempts)]
        return Decisions(self.paid_first + self.paid_last, ~last)

    @property
    def tokens(self) -> Decisions:
        """The decisions by token."""
        ends = np.cumsum(self.lengths)
        size = int(self.lengths.sum())
        rewards, has_next = np.zeros(size), np.ones(size, bool)
        rewards[ends - self.lengths] += self.paid_first
        rewards[ends - 1] += self.paid_last
        has_next[ends - 1] = self.turns.has_next
        return Decisions(rewards, has_next)

    def first_tokens(self, values: Array) -> Array:
        """[M] of [N]: the value at the first token of each turn."""
        first: Array = values[np.cumsum(self.lengths) - self.lengths]
        return first

    def turn_sums(self, values: Array) -> Array:
        """[M] of [N]: the sum over each turn's tokens."""
        edges = np.cumsum(self.lengths) - self.lengths
        return np.add.reduceat(values, edges) if len(edges) else values

    def on_tokens(self, values: Array) -> Array:
        """[N] of [M]: each turn's value on all of its tokens."""
        return np.repeat(values, self.lengths)

    def by_turn(self, values: Array) -> Credit:
        """[N] as one array per turn."""
        edges = np.concatenate([[0], np.cumsum(self.sizes)]).tolist()
        return [values[start:end] for start, end in pairwise(edges)]


def make_timeline(groups: Sequence[Group]) -> Timeline:
    """The turns of a step that have tokens, with every reward and outcome of their attempts."""
    rows: list[tuple[int, int, int, float, float]] = []
    attempt = 0
    for index, group in enumerate(groups):
        for trajectory in group.trajectories:
            payments = turn_payments(trajectory)
            rows.extend((index, attempt, turn, first, last) for turn, (first, last) in enumerate(payments))
            attempt += 1
    table = np.array(rows, np.float64).reshape(-1, 5)
    indices = table[:, :3].astype(np.int64)
    sizes = np.array([len(turn.action) for turn in turns_of(groups)], np.int64)
    return Timeline(sizes, indices[:, 0], indices[:, 1], indices[:, 2], table[:, 3], table[:, 4])


def turn_payments(trajectory: Trajectory) -> list[tuple[float, float]]:
    """(paid with the first token, paid with the last) of each turn that has tokens; the outcome is paid at the end."""
    before = 0.0
    payments: list[tuple[float, float]] = []
    for turn in trajectory.turns:
        if len(turn.action):
            payments.append((0.0 if payments else before, turn.reward))
        elif payments:
            payments[-1] = (payments[-1][0], payments[-1][1] + turn.reward)
        else:
            before += turn.reward
    if payments:
        payments[-1] = (payments[-1][0], payments[-1][1] + trajectory.outcome)
    return payments


def read_scores(groups: Sequence[Group], scores: Scores, name: str, reader: str) -> Array:
    """[N] a score of every action token; a one-line ValueError if it was not computed."""
    turns = list(turns_of(groups))
    if not turns:
        return np.zeros(0)
    if name not in scores:
        raise ValueError(f'credit {reader} needs scores["{name}"]: one number per action token; have them scored')
    assert [len(values) for values in scores[name]] == [len(turn.action) for turn in turns], name
    return concatenate(scores[name])


def policy_logprobs(groups: Sequence[Group], scores: Scores, reader: str) -> Array:
    """[N] logprobs of the policy before the step: as scored, else as the engine recorded them."""
    if "old" in scores:
        return read_scores(groups, scores, "old", reader)
    logprobs = concatenate([turn.logprobs for turn in turns_of(groups)])
    if np.isnan(logprobs).any():
        raise ValueError(
            f"credit {reader} reads logprobs of the engine, and some are NaN, as in demonstrations; "
            'give it scores["old"]'
        )
    return logprobs


def log_ratios(groups: Sequence[Group], scores: Scores, kl: float, reader: str) -> Array:
    """[N] log policy - log reference of each token: the k1 estimate of KL(policy || reference).

    Zero, without reading any scores, if `kl` is zero. k1: Schulman, "Approximating KL divergence" (2020).
    """
    if not kl:
        return np.zeros(sum(len(turn.action) for turn in turns_of(groups)))
    reference = read_scores(groups, scores, "reference", f"{reader} with kl")
    return policy_logprobs(groups, scores, f"{reader} with kl") - reference


def concatenate(arrays: Iterable[NDArray[np.float32]]) -> Array:
    """One float64 array of all values, also of no arrays at all."""
    return np.concatenate([np.zeros(0), *arrays]).astype(np.float64)
