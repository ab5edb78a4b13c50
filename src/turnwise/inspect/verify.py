"""Verifies a run on its recorded data: the records follow from the recipe (see `audit`), and layouts do not change the
result. For the second part, it computes loss and gradient of recorded turns under the run's model and objective in
several layouts: as trees, cut small, packed, and as padded rows that transformers computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from turnwise.assemble import objective as choices
from turnwise.assemble.learner import policy_of, tokens_per_pass
from turnwise.assemble.model import set_threads
from turnwise.inspect.audit import Audit, audit
from turnwise.inspect.case import Case, GradientOnlyLearner, Outcome, by_rows, case_of, computed_in, gradient_of
from turnwise.inspect.recorded_run import RecordedRun
from turnwise.inspect.rounding import PRECISIONS, Rounding, rounding_of
from turnwise.learn.learner import Learner
from turnwise.learn.policy import DTYPES, Policy, load_model
from turnwise.learn.transformers_reference import in_float64
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.plan.rows import in_rows, length
from turnwise.pretrained import CausalLM
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import Record
from turnwise.runs.screen import table
from turnwise.types import Group, Turn, turns_of

TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
LOOSE = 1e-6
"""Tolerance in float64 if a norm or a router of the model computes in float32 inside."""
WORK = 2.5e10
"""Tokens times parameters: all layouts together take about a minute on a laptop, in float64."""
ROUNDED = 4
"""Rounding is measured on this many times fewer tokens."""
AUDITED = 8
"""An audit scores this many times more tokens, because it needs only one forward pass."""
PADDED = "padded rows"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A layout compared with the padded rows."""

    layout: str
    passes: int
    tokens: int
    loss_difference: float
    """Relative to the sum of the absolute values of all terms, because the loss may be near zero."""
    gradient_error: float
    """Norm of the difference relative to the norm of the gradient, over all parameters."""
    tolerance: float
    worst: str
    """The parameter whose gradient differs most."""

    @property
    def passed(self) -> bool:
        """Whether both errors are within the tolerance; False if one of them is not a number."""
        return self.loss_difference <= self.tolerance and self.gradient_error <= self.tolerance

    @property
    def cells(self) -> tuple[str, ...]:
        size = (self.layout, str(self.passes), f"{self.tokens:,}")
        if self.layout == PADDED and self.passed:
            return *size, "", "", "", "the measure"
        verdict = "same" if self.passed else "DIFFERENT"
        return *size, f"{self.loss_difference:.1e}", f"{self.gradient_error:.1e}", f"{self.tolerance:.0e}", verdict


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference between the engine's recorded logprobs and the learner's, with the weights that sampled them."""

    step: int
    version: int
    num_tokens: int
    largest: float


@dataclass(frozen=True, slots=True)
class Verification:
    """The selected turns, the comparison of layouts, and the gap if there is a checkpoint to measure it with."""

    taken: tuple[str, ...]
    exact_norms: bool
    comparisons: tuple[Comparison, ...]
    """The padded rows come first."""
    gap: Gap | None
    audit: Audit
    rounding: Rounding | None = None
    """None if layouts were not compared."""

    @property
    def failed(self) -> list[Comparison]:
        return [comparison for comparison in self.comparisons if not comparison.passed]

    @property
    def passed(self) -> bool:
        further = [] if self.rounding is None else self.rounding.further
        return not (self.failed or further or self.audit.differences)

    def describe(self) -> list[str]:
        """Lines for a person."""
        lines = [*self.taken, ""]
        if self.comparisons:
            head = ("layout", "passes", "tokens", "loss difference", "gradient error", "tolerance", "verdict")
            lines += [*table(head, [comparison.cells for comparison in self.comparisons]), ""]
        if self.rounding is not None:
            lines += [*self.rounding.describe(), ""]
        lines += [*self.audit.describe(), ""]
        for comparison in self.failed:
            lines.append(f"{comparison.layout} is not the same; its gradient differs most in {comparison.worst}")
        if not self.exact_norms:
            lines.append("norms or routers of this model go through float32, and so float64 has a looser tolerance")
        if self.gap is None:
            lines.append("engine against learner: no checkpoint that is still there has sampled a recorded turn")
        else:
            lines.append(
                f"engine against learner: logprobs at most {self.gap.largest:.1e} apart, on {self.gap.num_tokens} "
                f"tokens of step {self.gap.step} that the weights of step {self.gap.version} sampled"
            )
        return lines


def verify(path: Path, step: int | None, max_groups: int, max_tokens: int | None, dtype: str) -> Verification:
    """Audit all records of a run, and compute recorded turns in every layout. It runs on the CPU."""
    for name, limit in (("groups", max_groups), ("tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"--{name} must be at least 1 (got {limit})")
    past = RecordedRun.open(path)
    step = past.step(step)
    set_threads(past.recipe)
    model = past.model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    is_limited = max_tokens is not None
    max_tokens = max_tokens or round(min(max(WORK / num_parameters, 512), 16384))
    audited = audit(past, model, max_tokens if is_limited else AUDITED * max_tokens)
    layouts: tuple[Comparison, ...] = ()
    rounding = None
    exact = dtype != "float64" or in_float64(model)
    try:
        taken, layouts = compared(past, step, model, max_groups, max_tokens, dtype, exact)
        rounding = rounded(past, take(past.kept(step), max_groups, max_tokens // ROUNDED))
    except ValueError as error:
        if not audited.differences:
            raise
        taken = (f"layouts were not compared: {error}",)
    gap = None if audited.damaged else gap_of(past, max_tokens)
    return Verification(taken, exact, layouts, gap, audited, rounding)


def compared(
    past: RecordedRun, step: int, model: CausalLM, max_groups: int, max_tokens: int, dtype: str, exact: bool
) -> tuple[tuple[str, ...], tuple[Comparison, ...]]:
    """(lines about the selected turns of a step, the comparisons of the layouts)."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    records = past.kept(step)
    selected = take(records, max_groups, max_tokens)
    model.to(DTYPES[dtype])
    policy = policy_of(computed_in(past.recipe, dtype), model)
    case = case_of(past, selected, policy)
    tolerance = TOLERANCES[dtype] if exact else LOOSE
    comparisons = compare(case, policy, past.recipe, tolerance)
    taken = (
        f"step {step} of {past.folder.path}: {amount(records, selected)}",
        f"under {objective_in_words(past.recipe)}, with the weights of step {past.checkpoint.step} "
        f"({num_parameters:,} parameters) in {dtype}",
    )
    return taken, tuple(comparisons)


def rounded(past: RecordedRun, selected: Sequence[Record]) -> Rounding:
    """How far layouts are from float64 in the precision of the run, by the policy gradient of recorded turns: without
    ratios, because a clip would make a step of a rounding error."""
    recipe = past.recipe
    turns = list(turns_of([record.group for record in selected]))
    pairs = [pair for record in selected for pair in zip(record.credit, record.weights, strict=True)]
    return rounding_of(
        past.model(),
        turns,
        [credit.astype(np.float64) * weights for credit, weights in pairs],
        PRECISIONS[recipe.model.dtype],
        temperature=recipe.sampling.temperature,
        tokens_per_pass=tokens_per_pass(recipe),
    )


def objective_in_words(recipe: Recipe) -> str:
    words = [f"{recipe.loss.name} anchored on the {choices.ratio_of(recipe).anchor}"]
    if recipe.correction.active:
        words.append("correction")
    if recipe.entropy:
        words.append(f"entropy {recipe.entropy:g}")
    if kl := choices.objective_of(recipe).kl:
        words.append(f"KL {kl:g}")
    if recipe.distill.coefficient:
        words.append(f"teacher {recipe.distill.coefficient:g}")
    return " + ".join(words)


def amount(records: Sequence[Record], selected: Sequence[Record]) -> str:
    """The size of the selection, in words."""
    attempts = [sum(len(record.group.trajectories) for record in which) for which in (selected, records)]
    turns = list(turns_of([record.group for record in selected]))
    return (
        f"{len(selected)} of {len(records)} groups, {attempts[0]} of {attempts[1]} attempts, {len(turns)} turns, "
        f"{sum(map(length, turns)):,} tokens"
    )


# ---------------------------------------------------------------- the selection


def take(records: Sequence[Record], max_groups: int, max_tokens: int) -> list[Record]:
    """Whole attempts of the groups that move the policy most, within both limits; at least one attempt."""
    ordered = sorted(records, key=lambda record: -movement(record))
    taken: list[Record] = []
    left = max_tokens
    for record in ordered[:max_groups]:
        attempts, num_turns = 0, 0
        for trajectory in record.group.trajectories:
            size = sum(map(length, trajectory.turns))
            if size > left and (taken or attempts):
                break
            attempts, num_turns, left = attempts + 1, num_turns + len(trajectory.turns), left - size
        if attempts:
            group = Group(record.group.task, record.group.trajectories[:attempts])
            taken.append(Record(group, True, record.credit[:num_turns], record.weights[:num_turns]))
    return taken


def movement(record: Record) -> float:
    """How much a group moves the policy: the sum of token weight times absolute credit."""
    pairs = zip(record.credit, record.weights, strict=True)
    return sum(float(np.abs(credit) @ weights) for credit, weights in pairs)


def layouts(turns: Sequence[Turn], tokens_per_pass: int, only_rows: bool) -> dict[str, list[Plan]]:
    """Plans by layout: the recipe's tree, a tree with passes so small that paths are split, and no sharing; of a model
    that is computed in rows, these."""
    longest = max(map(length, turns))
    if only_rows:
        return {"rows": in_rows(turns, tokens_per_pass), "rows, one a pass": in_rows(turns, longest)}
    small = max(1, longest // 2)
    return {
        "tree": cut(turns, tokens_per_pass),
        f"tree, {small} a pass": cut(turns, small),
        "packed": pack(turns, max(tokens_per_pass, longest)),
    }


def by_plans(learner: Learner, case: Case, plans: Sequence[Plan]) -> Outcome:
    """The outcome of a case with plans, by the same `update` that trains."""
    metrics, _ = learner.update(plans, case.credit, case.weights, case.scores, case.objective)
    passes, num_tokens = sum(len(plan.stretches) for plan in plans), sum(plan.num_tokens for plan in plans)
    return Outcome(passes, num_tokens, metrics["loss"], gradient_of(learner.policy.model))


def compare(case: Case, policy: Policy, recipe: Recipe, tolerance: float) -> list[Comparison]:
    """Every layout compared with the padded rows, which come first."""
    truth, size = by_rows(policy, case, recipe)
    if not any(gradient.any() for gradient in truth.gradient.values()):
        raise ValueError("the selected turns have no gradient, because all their credit is zero; choose another --step")
    learner = GradientOnlyLearner(policy)
    outcomes = {PADDED: truth}
    for name, plans in layouts(case.turns, tokens_per_pass(recipe), policy.in_rows).items():
        outcomes[name] = by_plans(learner, case, plans)
    comparisons = []
    for name, outcome in outcomes.items():
        error, worst = gradient_error(outcome.gradient, truth.gradient)
        difference = abs(outcome.loss - truth.loss) / max(size, 1e-300)
        comparisons.append(Comparison(name, outcome.passes, outcome.tokens, difference, error, tolerance, worst))
    return comparisons


def gradient_error(computed: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """(norm of the difference relative to the norm of the wanted gradient, the parameter that differs most)."""
    nothing = torch.zeros(())
    squares = {
        name: float((computed.get(name, nothing) - wanted.get(name, nothing)).double().square().sum())
        for name in {**wanted, **computed}
    }
    size = sum(float(gradient.double().square().sum()) for gradient in wanted.values())
    return (sum(squares.values()) / size) ** 0.5, max(squares, key=lambda name: squares[name])


# ---------------------------------------------------------------- engine against learner


def gap_of(past: RecordedRun, max_tokens: int) -> Gap | None:
    """The gap on recorded turns that an existing checkpoint sampled; the latest such checkpoint.

    The groups of a step were sampled at the latest by the weights of the step before, so the last checkpoint of a
    finished run has sampled nothing.
    """
    for checkpoint in past.checkpoints():
        for step in range(checkpoint.step + 1, checkpoint.step + past.recipe.max_lag + 2):
            records = past.kept(step) if step in past.steps else []
            turns = sampled_by(checkpoint.step, list(turns_of([record.group for record in records])), max_tokens)
            if turns:
                learner = GradientOnlyLearner(policy_of(past.recipe, load_model(checkpoint.path)))
                lay_out = in_rows if learner.policy.in_rows else cut
                plans = lay_out(turns, tokens_per_pass(past.recipe))
                logprobs = np.concatenate(learner.score(plans, len(turns)))
                largest = np.abs(logprobs - np.concatenate([turn.logprobs for turn in turns])).max()
                return Gap(step, checkpoint.step, len(logprobs), float(largest))
    return None


def sampled_by(version: int, turns: Sequence[Turn], max_tokens: int) -> list[Turn]:
    """The first turns that one version sampled entirely, as many as fit, at least one."""
    sampled: list[Turn] = []
    for turn in turns:
        if len(turn.action) and (turn.versions == version).all() and not np.isnan(turn.logprobs).any():
            max_tokens -= length(turn)
            if sampled and max_tokens < 0:
                break
            sampled.append(turn)
    return sampled
