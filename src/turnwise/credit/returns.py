"""Time within attempts: their moments in order, what each is paid, and discounted sums over what comes after.

A moment is an action token, or a turn that has any. A turn without tokens is no moment, because nothing was decided in
it: what it was paid counts with the last token before it or, where nothing was sampled yet, with the first token after
it. So nothing is lost, and the pay of an attempt's moments adds up to its total.

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
class Moments:
    """The moments of all attempts, one attempt after another.

    Example:
        Moments(rewards=np.array([0.0, 1.0, 0.5]), goes_on=np.array([True, False, False]))   two moments, then one
    """

    rewards: Array
    """What each moment is paid."""
    goes_on: NDArray[np.bool_]
    """Whether its attempt has another moment."""

    def next(self, values: Array) -> Array:
        """The value of the moment after each; 0 after an attempt's last."""
        return np.where(self.goes_on, np.roll(values, -1), 0.0)

    def discounted(self, values: Array, factor: float) -> Array:
        """values[i] + factor * values[i + 1] + factor**2 * values[i + 2] ..., to the end of the attempt.

        By doubling: pass j adds to each moment the sum that begins 2**j moments later. That is log n passes of numpy,
        without the division by powers of the factor that overflows in long attempts.
        """
        sums = np.array(values, np.float64)
        decay = factor * self.goes_on
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
        timeline(groups).turns.rewards
    """

    sizes: NDArray[np.int64]
    """[U] action tokens of every turn, of those without any too."""
    groups: NDArray[np.int64]
    """[M] which group of the step."""
    attempts: NDArray[np.int64]
    """[M] which attempt of the step."""
    places: NDArray[np.int64]
    """[M] how many turns of the attempt that have tokens came before."""
    early: Array
    """[M] paid before anything was sampled: counts with the first token."""
    late: Array
    """[M] counts with the last token."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[M] action tokens."""
        return self.sizes[self.sizes > 0]

    @property
    def turns(self) -> Moments:
        """Turns that have tokens as moments."""
        last = np.append(self.attempts[1:] != self.attempts[:-1], True)[: len(self.attempts)]
        return Moments(self.early + self.late, ~last)

    @property
    def tokens(self) -> Moments:
        """Action tokens as moments."""
        ends = np.cumsum(self.lengths)
        size = int(self.lengths.sum())
        rewards, goes_on = np.zeros(size), np.ones(size, bool)
        rewards[ends - self.lengths] += self.early
        rewards[ends - 1] += self.late
        goes_on[ends - 1] = self.turns.goes_on
        return Moments(rewards, goes_on)

    def first_tokens(self, values: Array) -> Array:
        """[M] of [N]: the value at the first token of each turn."""
        first: Array = values[np.cumsum(self.lengths) - self.lengths]
        return first

    def sums(self, values: Array) -> Array:
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


def timeline(groups: Sequence[Group]) -> Timeline:
    """The turns of a step that have tokens, with every reward and outcome of their attempts."""
    rows: list[tuple[int, int, int, float, float]] = []
    attempt = 0
    for place, group in enumerate(groups):
        for trajectory in group.trajectories:
            paid = payments(trajectory)
            rows.extend((place, attempt, turn, early, late) for turn, (early, late) in enumerate(paid))
            attempt += 1
    table = np.array(rows, np.float64).reshape(-1, 5)
    whole = table[:, :3].astype(np.int64)
    sizes = np.array([len(turn.action) for turn in turns_of(groups)], np.int64)
    return Timeline(sizes, whole[:, 0], whole[:, 1], whole[:, 2], table[:, 3], table[:, 4])


def payments(trajectory: Trajectory) -> list[tuple[float, float]]:
    """(early, late) pay of each turn that has tokens; the outcome comes with the last of them."""
    before = 0.0
    paid: list[tuple[float, float]] = []
    for turn in trajectory.turns:
        if len(turn.action):
            paid.append((0.0 if paid else before, turn.reward))
        elif paid:
            paid[-1] = (paid[-1][0], paid[-1][1] + turn.reward)
        else:
            before += turn.reward
    if paid:
        paid[-1] = (paid[-1][0], paid[-1][1] + trajectory.outcome)
    return paid


def scored(groups: Sequence[Group], scores: Scores, name: str, who: str) -> Array:
    """[N] a score of every action token; a one-line ValueError where nobody has scored it."""
    turns = list(turns_of(groups))
    if not turns:
        return np.zeros(0)
    if name not in scores:
        raise ValueError(f'credit {who} needs scores["{name}"]: one number per action token; have them scored')
    assert [len(values) for values in scores[name]] == [len(turn.action) for turn in turns], name
    return joined(scores[name])


def policy_logprobs(groups: Sequence[Group], scores: Scores, who: str) -> Array:
    """[N] logprobs of the policy before the step: as scored, or as the engine recorded them where nothing was."""
    if "old" in scores:
        return scored(groups, scores, "old", who)
    logprobs = joined([turn.logprobs for turn in turns_of(groups)])
    if np.isnan(logprobs).any():
        raise ValueError(
            f'credit {who} reads logprobs of the engine, and some are NaN, as in demonstrations; give it scores["old"]'
        )
    return logprobs


def log_ratios(groups: Sequence[Group], scores: Scores, kl: float, who: str) -> Array:
    """[N] how much likelier each token is to the policy than to the reference, in logprobs: the k1 estimate of their
    divergence. Zero, without looking at scores, where `kl` is."""
    if not kl:
        return np.zeros(sum(len(turn.action) for turn in turns_of(groups)))
    reference = scored(groups, scores, "reference", f"{who} with kl")
    return policy_logprobs(groups, scores, f"{who} with kl") - reference


def joined(arrays: Iterable[NDArray[np.float32]]) -> Array:
    return np.concatenate([np.zeros(0), *arrays]).astype(np.float64)


def check_fraction(who: str, **settings: float) -> None:
    """Refuse a setting outside of 0 to 1."""
    for name, value in settings.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"credit {who}: {name} must be between 0 and 1 (got {value!r})")


def check_not_negative(who: str, **settings: float) -> None:
    for name, value in settings.items():
        if not 0.0 <= value < np.inf:
            raise ValueError(f"credit {who}: {name} must be 0 or more (got {value!r})")
