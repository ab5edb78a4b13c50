"""A penalty for diverging from the reference, subtracted from rewards before anything is estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from turnwise.credit.returns import Scores, log_ratios, make_timeline
from turnwise.types import Group, Trajectory


def penalise(groups: Sequence[Group], scores: Scores, kl: float) -> list[Group]:
    """The same groups, in which the reward of every turn is lower by `kl` times the sum of its tokens' log ratios.

    reward_k - kl sum_t (log policy_t - log reference_t): the k1 estimate of KL(policy || reference), Schulman,
    "Approximating KL divergence" (2020). For estimators that see turns or whole attempts; those with `by_token` take
    `kl` themselves and penalise each token.
    """
    ratios = make_timeline(groups).by_turn(log_ratios(groups, scores, kl, "of a charge"))
    penalties = iter([kl * float(np.sum(of_turn)) for of_turn in ratios])
    return [
        replace(group, trajectories=tuple(penalise_turns(t, penalties) for t in group.trajectories)) for group in groups
    ]


def penalise_turns(trajectory: Trajectory, penalties: Iterator[float]) -> Trajectory:
    """The attempt with a penalty subtracted from each of its turns' rewards, in order."""
    return replace(
        trajectory, turns=tuple(replace(turn, reward=turn.reward - next(penalties)) for turn in trajectory.turns)
    )
