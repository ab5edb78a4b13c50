"""The audit of a run: checks that its records follow from its recipe and its weights.

It compares files with their checksums. It computes credit and token weights again from the recorded groups, logprobs
again with the checkpoint that sampled the tokens, and messages again from the tokens, and compares each with the
record. It lists the parts that it cannot check, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from turnwise.assemble import objective as choices
from turnwise.assemble.learner import LAYOUTS, policy_of, rl_learner, tokens_per_pass
from turnwise.assemble.model import renderer_of
from turnwise.assemble.run import settings_of
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.scope import PerTurn
from turnwise.inspect.recorded_run import RecordedRun
from turnwise.learn.learner import Learner
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.learn.schedules import schedule
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.plan import Plan
from turnwise.pretrained import CausalLM
from turnwise.recipe.cluster import ClusterConfig
from turnwise.recipe.schema import Recipe
from turnwise.rollout.render.formats.coerce import specs_of
from turnwise.runs.archive import Record, read_step
from turnwise.runs.checkpoint import Checkpoint
from turnwise.runs.seal import is_intact
from turnwise.training.loop import is_stale
from turnwise.types import Trajectory, Turn, turns_of

EXACT = 1e-6
"""Tolerance of credit and token weights that need no model, relative to the largest of the step."""
SCORED = 1e-3
"""Tolerance of credit that needs the scores of a model, relative to the largest of the step."""
LOGPROBS = 1e-4
"""Tolerance of logprobs for the slot engine in float32; for others it is ten times guards.max_logprob_gap."""


@dataclass(frozen=True, slots=True)
class Audit:
    """The result: what was compared, what could not be compared, and the differences."""

    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    differences: tuple[str, ...]
    """One line for each difference."""
    damaged: frozenset[int]
    """Steps whose file cannot be read."""

    def describe(self, most: int = 20) -> list[str]:
        """Lines for a person; the differences come last, at most `most` of them."""
        lines = [f"checked: {line}" for line in self.checked] + [f"not checked: {line}" for line in self.unchecked]
        lines += [f"DIFFERENT: {line}" for line in self.differences[:most]]
        if len(self.differences) > most:
            lines.append(f"DIFFERENT: {len(self.differences) - most} more")
        return lines


class Notes:
    """The findings of an audit so far."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.unchecked: list[str] = []
        self.differences: list[str] = []


class AuditCheck(Protocol):
    """One kind of comparison: it gets every step, then `end` is called."""

    def step(self, step: int, records: Sequence[Record]) -> None: ...

    def end(self) -> None: ...


def audit(past: RecordedRun, model: CausalLM, max_tokens: int) -> Audit:
    """Audit all records of a run, step by step, the latest first. `model` is its latest model. For each kind of check,
    models compute at most `max_tokens` tokens."""
    notes = Notes()
    check_files(past, notes)
    checkpoints = whole_checkpoints(past, notes)
    checks: list[AuditCheck] = [
        CheckWeights(past, notes),
        CheckCredit(past, Rescored(past, checkpoints, scores_for_credit(past.recipe), max_tokens), notes),
        CheckTexts(past, model, notes),
        CheckLogprobs(past, checkpoints, max_tokens, notes),
    ]
    damaged = set()
    for step in reversed(past.steps):
        try:
            records = read_step(past.folder.archive / f"step-{step:06d}.parquet")
        except (ValueError, KeyError, OSError) as error:
            notes.differences.append(str(error))
            damaged.add(step)
            continue
        for check in checks:
            check.step(step, records)
    for check in checks:
        check.end()
    return Audit(tuple(notes.checked), tuple(notes.unchecked), tuple(notes.differences), frozenset(damaged))


# ---------------------------------------------------------------- files


def check_files(past: RecordedRun, notes: Notes) -> None:
    """Compare the files of evaluations with their checksums, and count the files of steps that have one. The files of
    steps are compared when they are read."""
    paths = [past.folder.archive / f"step-{step:06d}.parquet" for step in past.steps]
    evaluations = sorted(past.folder.evaluations.rglob("*.parquet"))
    intact = {path: is_intact(path.read_bytes()) for path in (*paths, *evaluations)}
    notes.differences += [f"{path} does not match its checksum" for path in evaluations if intact[path] is False]
    unsealed = sum(matches is None for matches in intact.values())
    notes.checked.append(f"checksums of {len(intact) - unsealed} files of archive and evaluations")
    if unsealed:
        notes.unchecked.append(f"checksums of {unsealed} files of archive and evaluations, which have none")


def whole_checkpoints(past: RecordedRun, notes: Notes) -> list[Checkpoint]:
    """The undamaged checkpoints, the latest first."""
    return list(past.checkpoints(notes.differences))


# ---------------------------------------------------------------- credit and weights


class CheckWeights:
    """Compares the recorded token weights with those that the recipe gives for the groups of each update."""

    def __init__(self, past: RecordedRun, notes: Notes) -> None:
        self.weigh, self.settings = choices.weighting_of(past.recipe), settings_of(past.recipe)
        self.notes = notes
        self.count = 0

    def step(self, step: int, records: Sequence[Record]) -> None:
        trained_records, size = [record for record in records if record.kept], self.settings.groups_per_update
        wanted: list[Any] = []
        for start in range(0, len(trained_records), size):
            groups = [record.group for record in trained_records[start : start + size]]
            stale = is_stale(list(turns_of(groups)), step - 1, self.settings)
            wanted += [weight * (not old) for weight, old in zip(self.weigh(groups), stale, strict=True)]
        recorded = [weights for record in trained_records for weights in record.weights]
        self.notes.differences += compare_turns("weight", step, trained_records, recorded, wanted, EXACT)
        self.count += 1

    def end(self) -> None:
        self.notes.checked.append(f"token weights of {self.count} steps, to {EXACT:g} of the largest of each")


class CheckCredit:
    """Compares the recorded credit with the credit that the recipe's estimator gives for the groups of each step."""

    def __init__(self, past: RecordedRun, rescored: Rescored, notes: Notes) -> None:
        self.name, self.estimate = past.recipe.credit.name, choices.estimate_of(past.recipe)
        self.rescored = rescored
        self.tolerance = SCORED if rescored.needed else EXACT
        self.notes = notes
        self.count = self.left_out = 0

    def step(self, step: int, records: Sequence[Record]) -> None:
        trained_records = [record for record in records if record.kept]
        groups = [record.group for record in trained_records]
        scores = self.rescored.scores(step, list(turns_of(groups)))
        if scores is None:
            self.left_out += 1
            return
        recorded = [credit for record in trained_records for credit in record.credit]
        wanted = self.estimate(groups, scores)
        self.notes.differences += compare_turns("credit", step, trained_records, recorded, wanted, self.tolerance)
        self.count += 1

    def end(self) -> None:
        if self.count:
            how = f"by {self.name}, to {self.tolerance:g} of the largest of each"
            self.notes.checked.append(f"credit of {self.count} steps {how}")
        if self.left_out:
            needed = " and ".join(sorted(self.rescored.needed))
            self.notes.unchecked.append(
                f"credit of {self.left_out} steps: {self.name} needs {needed} of the step before; its checkpoint was "
                "removed, or --tokens is used up"
            )


def scores_for_credit(recipe: Recipe) -> frozenset[str]:
    """The scores that the computation of credit needs."""
    of_charge = choices.needs(recipe) & {"reference", "old"} if choices.charges_kl(recipe) else frozenset()
    return ESTIMATORS[recipe.credit.name].needs | of_charge


class Rescored:
    """Computes again, with the models of a run, the scores from which a step's credit was computed."""

    def __init__(
        self, past: RecordedRun, checkpoints: Sequence[Checkpoint], needed: frozenset[str], max_tokens: int
    ) -> None:
        self.past = past
        self.by_step = {checkpoint.step: checkpoint for checkpoint in checkpoints}
        self.needed = needed
        self.left = max_tokens
        self.changes = bool(needed & {"old", "values"})
        """Whether training changes a model that gives scores, so that the checkpoint before the step is needed."""
        self.learners: dict[int, Learner] = {}

    def scores(self, step: int, turns: Sequence[Turn]) -> dict[str, PerTurn] | None:
        """The scores at the start of a step; None if they cannot be computed."""
        if not self.needed:
            return {}
        version = step - 1 if self.changes else max(self.by_step, default=-1)
        plans = lay_out(self.past.recipe, turns)
        self.left -= sum(plan.num_tokens for plan in plans)
        if version not in self.by_step or self.left < 0:
            return None
        if version not in self.learners:
            try:
                self.learners = {version: learner_at(self.past, self.by_step[version])}
            except OSError:  # the reference or the teacher was removed
                return None
        learner = self.learners[version]
        return {name: learner.score(plans, len(turns), name) for name in sorted(self.needed)}


def learner_at(past: RecordedRun, checkpoint: Checkpoint) -> Learner:
    """The learner of a run, restored from a checkpoint, in this process and on the CPU."""
    recipe = on_one_cpu(past.recipe)
    folder = past.folder.reference if recipe.lora.rank else checkpoint.path
    start = partial(load_model, past.folder.reference)
    learner = rl_learner(recipe, load_model(folder), load_tokenizer(checkpoint.path), start)
    learner.restore(checkpoint.path)
    return learner


def on_one_cpu(recipe: Recipe) -> Recipe:
    """The recipe for one process on the CPU."""
    return recipe.model_copy(
        update={"cluster": ClusterConfig(), "model": recipe.model.model_copy(update={"device": "cpu"})}
    )


def lay_out(recipe: Recipe, turns: Sequence[Turn]) -> list[Plan]:
    return LAYOUTS[recipe.layout](turns, tokens_per_pass(recipe))


# ---------------------------------------------------------------- tokens and logprobs


class CheckTexts:
    """Compares the message of every action with the recorded message."""

    def __init__(self, past: RecordedRun, model: CausalLM, notes: Notes) -> None:
        self.driven = {entry.label for entry in past.recipe.env if entry.is_driven}
        self.renderer = renderer_of(past.recipe, model, load_tokenizer(past.checkpoint.path))
        self.notes = notes
        self.count = 0

    def step(self, step: int, records: Sequence[Record]) -> None:
        for name, dataset, turn in all_turns(records):
            if dataset in self.driven or not len(turn.action):
                continue
            self.count += 1
            implied = specs_of(turn.said.calls)  # the tools of a turn are not recorded
            if self.renderer.said(turn.prompt, turn.action, implied) != turn.said:
                self.notes.differences.append(f"step {step}, {name}: its tokens do not give the recorded message")

    def end(self) -> None:
        self.notes.checked.append(f"tokens of {self.count:,} turns against their text")
        if self.driven:
            names = ", ".join(sorted(self.driven))
            self.notes.unchecked.append(f"tokens against text of {names}, whose prompts an agent makes")


class CheckLogprobs:
    """Compares the recorded logprobs with those of the checkpoints that sampled the tokens."""

    def __init__(self, past: RecordedRun, checkpoints: Sequence[Checkpoint], max_tokens: int, notes: Notes) -> None:
        self.recipe = recipe = past.recipe
        self.by_step = (
            {} if recipe.engine.memory.keep_cache else {checkpoint.step: checkpoint for checkpoint in checkpoints}
        )
        self.left = max_tokens
        self.notes = notes
        precise = recipe.model.dtype == "float32" and recipe.engine.name == "slots"
        self.tolerance = (
            LOGPROBS / min(1.0, recipe.sampling.temperature) if precise else 10 * choices.max_logprob_gap_of(recipe)
        )
        self.count, self.total, self.largest = 0, 0, 0.0
        self.scorer: tuple[int, Learner] | None = None

    def step(self, step: int, records: Sequence[Record]) -> None:
        by_version: dict[int, list[tuple[str, Turn]]] = {}
        for name, _, turn in all_turns(records):
            self.total += len(turn.action)
            if len(turn.action) and (turn.versions == turn.versions[0]).all():  # one version sampled the whole action
                by_version.setdefault(int(turn.versions[0]), []).append((name, turn))
        for version, turns in by_version.items():
            if version in self.by_step:
                self.compare(step, version, turns)

    def compare(self, step: int, version: int, turns: Sequence[tuple[str, Turn]]) -> None:
        plans = lay_out(self.recipe, [turn for _, turn in turns])
        self.left -= sum(plan.num_tokens for plan in plans)
        if self.left < 0:
            return
        for (name, turn), rescored in zip(turns, self.scorer_of(version).score(plans, len(turns)), strict=True):
            gap = np.abs(rescored.astype(np.float64) - turn.logprobs)
            worst = int(np.argmax(np.where(np.isnan(gap), math.inf, gap)))
            self.count += len(gap)
            if gap[worst] <= self.tolerance:
                self.largest = max(self.largest, float(gap[worst]))
                continue
            self.notes.differences.append(
                f"step {step}, {name}: token {worst} has logprob {turn.logprobs[worst]:.6f}, but the checkpoint of "
                f"step {version}, which sampled it, gives {rescored[worst]:.6f}"
            )

    def scorer_of(self, version: int) -> Learner:
        """A learner that scores with the weights of a checkpoint; only one is in memory at a time."""
        if self.scorer is None or self.scorer[0] != version:
            policy = policy_of(on_one_cpu(self.recipe), load_model(self.by_step[version].path))
            self.scorer = version, Learner(policy, OptimizerSettings(0.0), schedule("constant", 0, 1))
        return self.scorer[1]

    def end(self) -> None:
        if self.count:
            how = f"at most {self.largest:.1e} off, limit {self.tolerance:g}"
            self.notes.checked.append(f"logprobs of {self.count:,} tokens by the checkpoints that sampled them: {how}")
        if self.recipe.engine.memory.keep_cache:
            self.notes.unchecked.append(
                "logprobs: with engine.memory.keep_cache they depend on weights of several versions"
            )
        elif self.count < self.total:
            self.notes.unchecked.append(
                f"logprobs of {self.total - self.count:,} tokens: their checkpoint was removed, or --tokens is used up"
            )


# ---------------------------------------------------------------- turns


def compare_turns(
    quantity: str, step: int, trained_records: Sequence[Record], recorded: PerTurn, wanted: PerTurn, tolerance: float
) -> Iterator[str]:
    """A line for each turn with a number that differs from the wanted one."""
    largest = max((float(np.abs(values).max(initial=0.0)) for values in wanted), default=0.0)
    names = [name for name, _ in trained_turns(trained_records)]
    for name, values, right in zip(names, recorded, wanted, strict=True):
        off = np.abs(values.astype(np.float64) - np.asarray(right).astype(np.float32))
        if len(off) and not off.max() <= tolerance * largest:
            worst = int(np.argmax(np.where(np.isnan(off), math.inf, off)))
            yield (
                f"step {step}, {name}: token {worst} has {quantity} {values[worst]:.6g}, but the recipe gives "
                f"{right[worst]:.6g}"
            )


def trained_turns(trained_records: Sequence[Record]) -> Iterator[tuple[str, Turn]]:
    """(name, turn) of the turns that were trained on, in the order of `turns_of`."""
    for number, record in enumerate(trained_records):
        for attempt, trajectory in enumerate(record.group.trajectories):
            for index, turn in enumerate(trajectory.turns):
                yield name_of(number, record, attempt, index), turn


def all_turns(records: Sequence[Record]) -> Iterator[tuple[str, str, Turn]]:
    """(name, dataset, turn) of every recorded turn."""
    for number, record in enumerate(records):
        attempts: tuple[Trajectory, ...] = (*record.group.trajectories, *record.group.failed)
        for attempt, trajectory in enumerate(attempts):
            for index, turn in enumerate(trajectory.turns):
                yield name_of(number, record, attempt, index), record.group.task.dataset, turn


def name_of(number: int, record: Record, attempt: int, turn: int) -> str:
    """The name of a turn. All numbers count from 0, as in the archive."""
    return f"group {number} (task {record.group.task.id}), attempt {attempt}, turn {turn}"
