"""Estimators that give the decisions of an attempt different advantages: by turn, or by token.

They see whole trajectories: a turn's tokens are followed by those of the next turn, whatever its prompt kept of them.
Letters: M turns that have tokens, N action tokens; G_k the discounted reward from turn k on, outcome included.
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
    Decisions,
    Scores,
    Timeline,
    log_ratios,
    make_timeline,
    read_scores,
)
from turnwise.credit.settings import check_fraction, check_not_negative
from turnwise.credit.totals import against_others, group_means, grpo, standardise
from turnwise.types import Group


def reinforce_pp(
    groups: Sequence[Group], scores: Scores, *, gamma: float = 1.0, baseline: bool = False, kl: float = 0.0
) -> Credit:
    """The discounted reward from each token on, whitened over the step's tokens; `baseline` first subtracts the group's
    mean total. A KL penalty on the reward is charged token by token.

    A_t = whiten(sum_{s >= t} gamma^(s - t) (reward_s - kl log(policy_s / reference_s)) - baseline).
    REINFORCE++ and REINFORCE++-baseline, arXiv 2501.03262. Whitening assumes that all tasks of a step are of one scale.
    The mean total is subtracted from the return of a token, not from the outcome: discounted over the attempt's length,
    the baseline would depend on the action.
    """
    check_fraction("credit reinforce_pp: gamma", gamma)
    check_not_negative("credit reinforce_pp: kl", kl)
    timeline = make_timeline(groups)
    tokens = timeline.tokens
    rewards = tokens.rewards - kl * log_ratios(groups, scores, kl, "reinforce_pp")
    returns = tokens.discounted_sums(rewards, gamma)
    if baseline:
        returns = returns - timeline.on_tokens(group_means(groups)[timeline.groups])
    return timeline.by_turn(standardise(returns))


def reward_to_go(groups: Sequence[Group], scores: Scores, *, gamma: float = 1.0) -> Credit:
    """The discounted reward from each turn on, minus the group's mean total.

    A_k = G_k - mean over the group of R. Assumes that what an attempt earned before turn k is small: the baseline is
    that of the first turn, so later turns of attempts that were paid early get lower advantages.
    """
    check_fraction("credit reward_to_go: gamma", gamma)
    timeline = make_timeline(groups)
    advantages = turn_returns(timeline, gamma) - group_means(groups)[timeline.groups]
    return timeline.by_turn(timeline.on_tokens(advantages))


def turn_baseline(groups: Sequence[Group], scores: Scores, *, gamma: float = 1.0) -> Credit:
    """The discounted reward from each turn on, minus its mean over the group's other attempts that reached the turn.

    A_k = G_k - mean of G_k over the others with a turn k; the baseline is 0 if there are no others. RLOO (arXiv
    2402.14740) for each turn index. Leaving the attempt itself out, and dividing by no deviation, keeps the gradient
    unbiased where the policy decides how many turns there are (tests/credit/bias.py). For the same reason a lone
    attempt has a baseline of 0 and not an advantage of 0.
    """
    check_fraction("credit turn_baseline: gamma", gamma)
    timeline = make_timeline(groups)
    advantages = turn_returns(timeline, gamma)
    same_turn = zip(timeline.groups.tolist(), timeline.turn_indices.tolist(), strict=True)
    for indices in group_by(list(same_turn)):
        advantages[indices] = against_others(advantages[indices])
    return timeline.by_turn(timeline.on_tokens(advantages))


def gigpo(groups: Sequence[Group], scores: Scores, *, gamma: float = 0.95, weight: float = 1.0) -> Credit:
    """The advantage of grpo, plus `weight` times the discounted reward from each turn on, standardised among the turns
    of the group with the same last observation.

    A_k = (R - mean R) / std R + weight (G_k - mean G) / std G, the second over turns with equal observations.
    GiGPO, arXiv 2505.10978; equal last observations stand for its anchor states. Assumes that environments give the
    same text in the same state. A turn whose observation is unique gets only the first part.
    """
    check_fraction("credit gigpo: gamma", gamma)
    check_not_negative("credit gigpo: weight", weight)
    timeline = make_timeline(groups)
    advantages = turn_returns(timeline, gamma)
    for indices in group_by(last_observations(groups)):
        advantages[indices] = standardise(advantages[indices])
    of_turns = timeline.by_turn(timeline.on_tokens(weight * advantages))
    return [of_attempt + of_turn for of_attempt, of_turn in zip(grpo(groups, scores), of_turns, strict=True)]


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
    """Generalised advantages from a critic's values, by token or one per turn; whitened over the step's tokens. A KL
    penalty on the reward is charged token by token.

    A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = reward_t - kl log(policy_t / reference_t) + gamma V_{t+1} - V_t.
    arXiv 1506.02438.
    Assumes a critic that has learned: with lam < 1 its errors bias the advantages. The value after a turn's last token
    is that of the next turn's prompt, and 0 after the last turn, also where the attempt was cut short.
    """
    timeline, decisions, values = with_values(groups, scores, unit, kl)
    advantages = generalised_advantages(decisions, values, gamma, lam)
    on_tokens = timeline.on_tokens(advantages) if unit == "turn" else advantages
    return timeline.by_turn(standardise(on_tokens) if whiten else on_tokens)


def critic_targets(
    groups: Sequence[Group],
    scores: Scores,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    unit: Literal["token", "turn"] = "token",
    kl: float = 0.0,
) -> Credit:
    """What a critic learns: gae's advantage before whitening, plus the value it was measured from.

    target_t = A_t + V_t, the lambda-return (arXiv 1506.02438). By turn, V is the value of the prompt, and the sum is
    the target of every token of the turn: no time passes within one.
    """
    timeline, decisions, values = with_values(groups, scores, unit, kl)
    targets = generalised_advantages(decisions, values, gamma, lam) + values
    return timeline.by_turn(timeline.on_tokens(targets) if unit == "turn" else targets)


def with_values(groups: Sequence[Group], scores: Scores, unit: str, kl: float) -> tuple[Timeline, Decisions, Array]:
    """(timeline, decisions of the unit with a KL penalty on their rewards, the critic's value before each)."""
    if unit not in ("token", "turn"):
        raise ValueError(f'credit gae: unit must be "token" or "turn" (got {unit!r})')
    check_not_negative("credit gae: kl", kl)
    timeline = make_timeline(groups)
    values = read_scores(groups, scores, "values", "gae")
    penalties = kl * log_ratios(groups, scores, kl, "gae")
    if unit == "turn":
        turns = timeline.turns
        penalised = replace(turns, rewards=turns.rewards - timeline.turn_sums(penalties))
        return timeline, penalised, timeline.first_tokens(values)
    tokens = timeline.tokens
    return timeline, replace(tokens, rewards=tokens.rewards - penalties), values


def generalised_advantages(decisions: Decisions, values: Array, gamma: float, lam: float) -> Array:
    """Discounted sums of temporal differences."""
    check_fraction("credit gae: gamma", gamma)
    check_fraction("credit gae: lam", lam)
    differences = decisions.rewards + gamma * decisions.next_values(values) - values
    return decisions.discounted_sums(differences, gamma * lam)


def turn_returns(timeline: Timeline, gamma: float) -> Array:
    """[M] the discounted reward from each turn on, outcome included."""
    turns = timeline.turns
    return turns.discounted_sums(turns.rewards, gamma)


def last_observations(groups: Sequence[Group]) -> list[Hashable]:
    """[M] (group, what the policy saw last before each turn): the messages after the turn before, at first the task."""
    return [
        (index, trajectory.turns[number - 1].heard if number else group.task.id)
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
        for number, turn in enumerate(trajectory.turns)
        if len(turn.action)
    ]


def group_by(keys: Sequence[Hashable]) -> list[NDArray[np.int64]]:
    """The indices of each key, in the order in which the keys first occur."""
    indices: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        indices.setdefault(key, []).append(index)
    return [np.array(of_key, np.int64) for of_key in indices.values()]
