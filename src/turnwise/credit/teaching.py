"""Estimators for learning from somebody who knows better, whatever an attempt was paid."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.credit.returns import Credit, Scores, policy_logprobs, scored, timeline
from turnwise.types import Group, turns_of


def distill(groups: Sequence[Group], scores: Scores) -> Credit:
    """How much likelier each token is to a teacher than to the policy, in logprobs: on-policy distillation."""
    teacher = scored(groups, scores, "teacher", "distill")
    return timeline(groups).by_turn(teacher - policy_logprobs(groups, scores, "distill"))


def none(groups: Sequence[Group], scores: Scores) -> Credit:
    """Zero for every token: what there is to learn is in other terms of the loss."""
    return [np.zeros(len(turn.action)) for turn in turns_of(groups)]


def imitate(groups: Sequence[Group], scores: Scores) -> Credit:
    """One for every token: demonstrations are all to be learned."""
    return [np.ones(len(turn.action)) for turn in turns_of(groups)]
