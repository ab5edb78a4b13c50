"""Estimators that tell the moments of an attempt apart: by turn, or by token. They work on turns because they see whole
trajectories; a turn's tokens are followed by those of the next turn, whatever its prompt kept of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turnwise.credit.returns import (
    Array,
    Credit,
    Moments,
    Scores,
    Timeline,
    check_fraction,
    check_not_negative,
    log_ratios,
    scored,
    timeline,
)
from turnwise.credit.totals import against_others, group_means, grpo, standardise
from turnwise.types import Group


def reinforce_pp(
    groups: Sequence[Group], scores: Scores, *, gamma: float = 1.0, baseline: bool = False, kl: float = 0.0
) -> Credit:
    """Discounted pay from each token on, whitened over the step's tokens; `baseline` subtracts the group's mean total
    first, `kl` charges every token that times its log ratio to the reference.

    The mean total is subtracted from what follows a token, not from the outcome: discounted by the length of the
    attempt it would depend on the action.
    """
    check_fraction("reinforce_pp", gamma=gamma)
    check_not_negative("reinforce_pp", kl=kl)
    time = timeline(groups)
    tokens = time.tokens
    returns = tokens.discounted(tokens.rewards - kl * log_ratios(groups, scores, kl, "reinforce_pp"), gamma)
    if baseline:
        returns = returns - time.on_tokens(group_means(groups)[time.groups])
    return time.by_turn(standardise(returns))


def reward_to_go(groups: Sequence[Group], scores: Scores, *, gamma: float = 1.0) -> Credit:
    """Discounted pay from each turn on, against the group's mean total."""
    check_fraction("reward_to_go", gamma=gamma)
    time = timeline(groups)
    return time.by_turn(time.on_tokens(returns_of(time, gamma) - group_means(groups)[time.groups]))


def turn_baseline(groups: Sequence[Group], scores: Scores, *, gamma: float = 1.0) -> Credit:
    """Discounted pay from each turn on, against the mean of it over the group's other attempts that reached the turn.

    Leaving the attempt itself out, and not dividing by a deviation, is what keeps the gradient unbiased where the
    policy decides how many turns there are: see tests/credit/bias.py. Nobody to compare with is a baseline of 0, not a
    credit of 0, for the same reason.
    """
    check_fraction("turn_baseline", gamma=gamma)
    time = timeline(groups)
    advantages = returns_of(time, gamma)
    for alike in alike_of(list(zip(time.groups.tolist(), time.places.tolist(), strict=True))):
        advantages[alike] = against_others(advantages[alike])
    return time.by_turn(time.on_tokens(advantages))


def gigpo(groups: Sequence[Group], scores: Scores, *, gamma: float = 0.95, weight: float = 1.0) -> Credit:
    """The advantage of grpo, plus `weight` times the discounted pay from each turn on, standardised among the turns of
    the group that were shown the same messages last."""
    check_fraction("gigpo", gamma=gamma)
    check_not_negative("gigpo", weight=weight)
    time = timeline(groups)
    advantages = returns_of(time, gamma)
    for alike in alike_of(shown(groups)):
        advantages[alike] = standardise(advantages[alike])
    by_turn = time.by_turn(time.on_tokens(weight * advantages))
    return [whole + own for whole, own in zip(grpo(groups, scores), by_turn, strict=True)]


def gae(
    groups: Sequence[Group],
    scores: Scores,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    unit: Literal["token", "turn"] = "token",
    whiten: bool = True,
    kl: float = 0.0,
) -> Credit:
    """Generalised advantages from a critic's values, by token or one per turn; whitened over the step's tokens. `kl`
    charges every token that times its log ratio to the reference.

    The value after a turn's last token is that of the next turn's own prompt, and 0 after the last turn, also where
    the attempt was cut short.
    """
    time, moments, values = valued(groups, scores, unit, kl)
    advantages = generalised(moments, values, gamma, lam)
    on_tokens = time.on_tokens(advantages) if unit == "turn" else advantages
    return time.by_turn(standardise(on_tokens) if whiten else on_tokens)


def critic_targets(
    groups: Sequence[Group],
    scores: Scores,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    unit: Literal["token", "turn"] = "token",
    kl: float = 0.0,
) -> Credit:
    """What a critic shall learn: gae's advantage before whitening, plus the value it was measured from.

    By turn that value is the prompt's, and the sum is the target of every token of the turn: no time passes within one.
    """
    time, moments, values = valued(groups, scores, unit, kl)
    targets = generalised(moments, values, gamma, lam) + values
    return time.by_turn(time.on_tokens(targets) if unit == "turn" else targets)


def valued(groups: Sequence[Group], scores: Scores, unit: str, kl: float) -> tuple[Timeline, Moments, Array]:
    """The moments of the unit, charged for the divergence from the reference, and the critic's value before each."""
    if unit not in ("token", "turn"):
        raise ValueError(f'credit gae: unit must be "token" or "turn" (got {unit!r})')
    check_not_negative("gae", kl=kl)
    time = timeline(groups)
    values = scored(groups, scores, "values", "gae")
    charges = kl * log_ratios(groups, scores, kl, "gae")
    if unit == "turn":
        turns = time.turns
        return time, replace(turns, rewards=turns.rewards - time.sums(charges)), time.first_tokens(values)
    tokens = time.tokens
    return time, replace(tokens, rewards=tokens.rewards - charges), values


def generalised(moments: Moments, values: Array, gamma: float, lam: float) -> Array:
    """Discounted sums of temporal differences."""
    check_fraction("gae", gamma=gamma, lam=lam)
    surprise = moments.rewards + gamma * moments.next(values) - values
    return moments.discounted(surprise, gamma * lam)


def returns_of(time: Timeline, gamma: float) -> Array:
    """[M] discounted pay from each turn on, outcome included."""
    turns = time.turns
    return turns.discounted(turns.rewards, gamma)


def shown(groups: Sequence[Group]) -> list[Hashable]:
    """[M] what each turn was shown last: the messages heard after the turn before it, for a first turn the task."""
    return [
        (place, trajectory.turns[number - 1].heard if number else group.task.id)
        for place, group in enumerate(groups)
        for trajectory in group.trajectories
        for number, turn in enumerate(trajectory.turns)
        if len(turn.action)
    ]


def alike_of(keys: Sequence[Hashable]) -> list[NDArray[np.int64]]:
    """The places of each key."""
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return [np.array(found, np.int64) for found in places.values()]
