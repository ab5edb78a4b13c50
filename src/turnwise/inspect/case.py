"""A case for `turnwise verify`: recorded turns with all inputs of an update, and the loss and gradient that
transformers computes for them on padded rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.assemble import objective as choices
from turnwise.assemble.learner import policy_of, tokens_per_pass
from turnwise.credit.scope import PerTurn
from turnwise.inspect.recorded_run import RecordedRun
from turnwise.learn.head import bucketed
from turnwise.learn.learner import Learner
from turnwise.learn.objective import Objective
from turnwise.learn.policy import Policy, load_model
from turnwise.learn.routers import Routers
from turnwise.learn.schedules import schedule
from turnwise.learn.stepper import OptimizerSettings, Stepper
from turnwise.learn.teacher import Direction, Teacher
from turnwise.learn.transformers_reference import in_float64, stock_attention, stock_passes
from turnwise.plan.pack import pack
from turnwise.plan.rows import Rows, in_rows, length
from turnwise.pretrained import CausalLM
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import Record
from turnwise.types import Turn, turns_of


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One update on recorded turns: everything that loss and gradient depend on except the model and the layout."""

    turns: list[Turn]
    credit: PerTurn
    weights: PerTurn
    scores: Mapping[str, PerTurn]
    """Old and reference logprobs and the teacher's buckets, if the recipe needs them."""
    objective: Objective


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The loss and gradient of a case in one layout."""

    passes: int
    tokens: int
    loss: float
    gradient: Mapping[str, Tensor]
    """Gradients by the name of the parameter."""


def case_of(past: RecordedRun, records: Sequence[Record], policy: Policy) -> Case:
    """The update of the recipe: credit and token weights from the record, scores from the current weights."""
    recipe = past.recipe
    groups = [record.group for record in records]
    turns = list(turns_of(groups))
    credit = [values.astype(np.float64) for record in records for values in record.credit]
    weights = [values for record in records for values in record.weights]
    ratio, objective = choices.ratio_of(recipe), choices.objective_of(recipe)
    scores: dict[str, PerTurn] = {}
    old: PerTurn = []
    if ratio.anchor == "engine":
        old = [turn.logprobs for turn in turns]
        scores["old"] = ratio.compare(groups, old, lambda: score_rows(policy.model, turns, recipe, policy.routers))
    elif "old" in choices.needs(recipe):
        old = score_rows(policy.model, turns, recipe, policy.routers)
        scores["old"] = ratio.compare(groups, old, lambda: old)
    corrected, _ = choices.correct_of(recipe)(groups, credit, old)
    if objective.kl:
        scores["reference"] = score_reference(past, turns, policy.dtype)
    if objective.distill:
        scores["buckets"] = score_teacher(past, turns, policy)
    return Case(turns, corrected, weights, scores, objective)


def computed_in(recipe: Recipe, dtype: str) -> Recipe:
    """The recipe with another compute dtype, which need not be valid for a run."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


def score_reference(past: RecordedRun, turns: Sequence[Turn], dtype: torch.dtype) -> PerTurn:
    where = past.recipe.kl.reference
    folder = past.folder.reference if where == "start" else Path(where)
    return score_rows(frozen_model("reference", folder, dtype), turns, past.recipe)


def score_teacher(past: RecordedRun, turns: Sequence[Turn], policy: Policy) -> PerTurn:
    model = frozen_model("teacher", Path(past.recipe.teacher), policy.dtype)
    teaching = policy_of(computed_in(past.recipe, str(policy.dtype).removeprefix("torch.")), model, replay=False)
    learner = GradientOnlyLearner(policy)
    learner.models["buckets"] = Teacher(teaching, past.recipe.distill.top_k, len(policy.output))
    unshared = in_rows if policy.in_rows else pack
    plans = unshared(turns, max(tokens_per_pass(past.recipe), *map(length, turns)))
    return learner.score(plans, len(turns), "buckets")


def frozen_model(name: str, folder: Path, dtype: torch.dtype) -> CausalLM:
    if not folder.is_dir():
        raise ValueError(f"there is no {name} at {folder}; restore the folder from a copy")
    model = load_model(folder)
    if dtype == torch.float64:
        in_float64(model)
    return model.to(dtype)


# ---------------------------------------------------------------- padded rows, by transformers


@torch.no_grad()
def score_rows(model: CausalLM, turns: Sequence[Turn], recipe: Recipe, routers: Routers | None = None) -> list[Any]:
    """Logprobs of every action token, one array per turn."""
    scores: list[Any] = [np.zeros(0, np.float32)] * len(turns)
    with stock_attention(model):
        for rows, logprobs, _, _ in stock_passes(
            model, turns, tokens_per_pass(recipe), recipe.sampling.temperature, routers
        ):
            parts = logprobs.split([len(turns[turn].action) for turn in rows.turns])
            for turn, part in zip(rows.turns, parts, strict=True):
                scores[turn] = part.numpy()
    return scores


def by_rows(policy: Policy, case: Case, recipe: Recipe) -> tuple[Outcome, float]:
    """(the outcome of a case on padded rows, the sum of the absolute values of all terms of its loss)."""
    model = policy.model
    model.zero_grad()
    loss_inputs = {**case.scores, "credit": case.credit, "weight": case.weights}
    buckets = loss_inputs.pop("buckets", None)
    passes = num_tokens = 0
    loss = size = 0.0
    with stock_attention(model):
        turns, temperature = case.turns, recipe.sampling.temperature
        for rows, logprobs, entropies, distributions in stock_passes(
            model, turns, tokens_per_pass(recipe), temperature, policy.routers
        ):
            inputs = {
                name: torch.from_numpy(np.concatenate([values[turn] for turn in rows.turns])).to(logprobs.dtype)
                for name, values in loss_inputs.items()
            }
            old = inputs.get("old", logprobs.detach())
            divergence = (
                None if buckets is None else divergence_from(buckets, rows, distributions, case.objective.direction)
            )
            terms, _ = case.objective(logprobs, entropies, old, inputs["credit"], inputs.get("reference"), divergence)
            weighted = terms * inputs["weight"]
            weighted.sum().backward()
            loss += float(weighted.detach().sum())
            size += float(weighted.detach().abs().sum())
            passes, num_tokens = passes + 1, num_tokens + rows.num_tokens
    return Outcome(passes, num_tokens, loss, gradient_of(model)), size


def divergence_from(buckets: PerTurn, rows: Rows, distributions: Tensor, direction: Direction) -> Tensor:
    """The divergence between full distributions and a teacher's buckets."""
    teacher_buckets = np.concatenate([buckets[turn] for turn in rows.turns])
    tokens, teacher = (torch.from_numpy(np.ascontiguousarray(teacher_buckets[name])) for name in ("token", "logprob"))
    return direction(bucketed(distributions, tokens[:, :-1].long()), teacher.to(distributions.dtype))


# ---------------------------------------------------------------- plans, by the learner


class GradientOnlyLearner(Learner):
    """A learner that computes the gradient of an update and takes no step."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, OptimizerSettings(0.0), schedule("constant", 0, 1))
        self.stepper = NoStep(policy.model.named_parameters(), OptimizerSettings(0.0), schedule("constant", 0, 1))


class NoStep(Stepper):
    """A stepper that changes neither parameters nor gradients."""

    def step(self, finite: bool, idle: bool) -> dict[str, float]:
        return {}


def gradient_of(model: CausalLM) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
