"""One training step on given groups, with the parts of a real run, and what came to the learner in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from support.acting import byte_tokenizer
from support.assembling import parts_of as assembled
from support.making import gradients, make_model
from turnwise.recipe.parse import apply_override, parse_recipe
from turnwise.schedule.take import Taken
from turnwise.training.loop import LoopParts, train_step
from turnwise.types import Group


@dataclass(frozen=True)
class Update:
    """What one optimizer step was made of, and its gradient by parameter."""

    credit: list[np.ndarray]
    weights: list[np.ndarray]
    metrics: dict[str, float]
    gradient: dict[str, np.ndarray]
    num_tokens: int
    """Tokens that went through the model."""


@dataclass(frozen=True)
class Step:
    """What a training step has done."""

    metrics: dict[str, float]
    updates: list[Update] = field(default_factory=list)


def parts_of(num_groups: int, *overrides: str) -> LoopParts:
    """The parts of a run on a tiny model that trains on so many groups per step."""
    tree: dict[str, Any] = {
        "groups_per_step": num_groups,
        "env": [{"name": "hops", "tasks": {"count": 2}}],
        "engine": {"max_num_seqs": 2},
        "rollout": {"max_prompt_tokens": 200, "max_trajectory_tokens": 250},
        "optimizer": {"adamw": {"clip_norm": 1e9}},
    }
    for override in overrides:
        apply_override(tree, override)
    return assembled(parse_recipe(tree, "test"), make_model(), byte_tokenizer()).loop


def step_on(groups: Sequence[Group], *overrides: str, **stages: Any) -> Step:
    """A step on groups, with some of its stages replaced."""
    parts = parts_of(len(groups), *overrides)
    learner: Any = parts.learner
    updates: list[Update] = []
    real = learner.update

    def watched(plans: Any, credit: Any, weights: Any, scores: Any, objective: Any) -> Any:
        metrics, logprobs = real(plans, credit, weights, scores, objective)
        size = sum(plan.num_tokens for plan in plans)
        updates.append(Update(list(credit), list(weights), metrics, gradients(learner.policy.model), size))
        return metrics, logprobs

    learner.update = watched
    taken = Taken(tuple(groups), ())
    metrics, _ = train_step(parts.settings, replace(parts.stages, **stages), learner, taken, 0)
    return Step(metrics, updates)
