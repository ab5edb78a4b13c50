"""Estimators that learn from a teacher or from demonstrations and read no reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.credit.returns import Credit, Scores, make_timeline, policy_logprobs, read_scores
from turnwise.types import Group, turns_of


def distill(groups: Sequence[Group], scores: Scores) -> Credit:
    """How much likelier each token is to a teacher than to the policy, in logprobs: on-policy distillation.

    A_t = log teacher_t - log policy_t of the sampled token. On tokens that the policy sampled, its policy gradient is
    that of -KL(policy || teacher) at each token; the effect of a token on later ones is left out. On-policy
    distillation is described in GKD, arXiv 2306.13649. Assumes that teacher and policy have the same vocabulary.
    """
    teacher = read_scores(groups, scores, "teacher", "distill")
    return make_timeline(groups).by_turn(teacher - policy_logprobs(groups, scores, "distill"))


def none(groups: Sequence[Group], scores: Scores) -> Credit:
    """Zero for every token: all learning comes from other terms of the loss."""
    return [np.zeros(len(turn.action)) for turn in turns_of(groups)]


def imitate(groups: Sequence[Group], scores: Scores) -> Credit:
    """One for every token: all tokens of demonstrations are learned. Not for recipes; the warm start uses it."""
    return [np.ones(len(turn.action)) for turn in turns_of(groups)]
