"""The audit of a run: whether what it has recorded is what its recipe and its weights make of it.

Files are compared with their checksums, credit and token weights with what the recipe's own functions give for the
recorded groups, logprobs with those of the checkpoint that sampled them, and tokens with the text beside them. What
cannot be checked is said, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from turnwise.assemble import objective as choices
from turnwise.assemble.learner import LAYOUTS, policy_of, rl_learner
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
from turnwise.recipe.cluster import ClusterConfig
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import Record, read_step
from turnwise.runs.checkpoint import Checkpoint
from turnwise.runs.seal import is_intact
from turnwise.train.loop import is_stale
from turnwise.types import Trajectory, Turn, turns_of

EXACT = 1e-6
"""Of credit and weights that are recomputed from the same numbers, relative to the largest of the step."""
SCORED = 1e-3
"""Of credit for which models were asked again, likewise."""
LOGPROBS = 1e-4
"""Between engine and learner in float32, in the same process or one like it; elsewhere ten times
guards.max_logprob_gap."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What was compared, what could not be, and what differs."""

    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    differences: tuple[str, ...]
    """One line each."""
    damaged: frozenset[int]
    """Steps whose file cannot be read."""

    def describe(self, most: int = 20) -> list[str]:
        """Lines for a person; differences last, and not more than so many of them."""
        lines = [f"checked: {line}" for line in self.checked] + [f"not checked: {line}" for line in self.unchecked]
        lines += [f"DIFFERENT: {line}" for line in self.differences[:most]]
        if len(self.differences) > most:
            lines.append(f"DIFFERENT: {len(self.differences) - most} more")
        return lines


class Notes:
    """What an audit has found so far."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.unchecked: list[str] = []
        self.differences: list[str] = []


class AuditCheck(Protocol):
    """One kind of comparison: given every step, then ended."""

    def step(self, step: int, records: Sequence[Record]) -> None: ...

    def end(self) -> None: ...


def audit(past: RecordedRun, model: Any, max_tokens: int) -> Audit:
    """All that is recorded of a run whose latest model this is, a step at a time, the latest first; models compute at
    most so many tokens for each kind of check."""
    notes = Notes()
    check_files(past, notes)
    checkpoints = whole_checkpoints(past, notes)
    checks: list[AuditCheck] = [
        CheckWeights(past, notes),
        CheckCredit(past, Asked(past, checkpoints, scores_for_credit(past.recipe), max_tokens), notes),
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
    """Compare the files of evaluations with their checksums, and say how many of those of steps have one; these are
    compared when they are read."""
    paths = [past.folder.archive / f"step-{step:06d}.parquet" for step in past.steps]
    others = sorted(past.folder.evaluations.rglob("*.parquet"))
    intact = {path: is_intact(path.read_bytes()) for path in (*paths, *others)}
    notes.differences += [f"{path} does not match its checksum" for path in others if intact[path] is False]
    unsealed = sum(found is None for found in intact.values())
    notes.checked.append(f"checksums of {len(intact) - unsealed} files of archive and evaluations")
    if unsealed:
        notes.unchecked.append(f"checksums of {unsealed} files of archive and evaluations, which have none")


def whole_checkpoints(past: RecordedRun, notes: Notes) -> list[Checkpoint]:
    """Checkpoints that are as they were written, the latest first."""
    return list(past.checkpoints(notes.differences))


# ---------------------------------------------------------------- credit and weights


class CheckWeights:
    """Token weights as the recipe gives them for the groups of each update."""

    def __init__(self, past: RecordedRun, notes: Notes) -> None:
        self.weigh, self.settings = choices.weighting_of(past.recipe), settings_of(past.recipe)
        self.notes = notes
        self.count = 0

    def step(self, step: int, records: Sequence[Record]) -> None:
        kept, size = [record for record in records if record.kept], self.settings.groups_per_update
        wanted: list[Any] = []
        for start in range(0, len(kept), size):
            groups = [record.group for record in kept[start : start + size]]
            stale = is_stale(list(turns_of(groups)), step - 1, self.settings)
            wanted += [weight * (not old) for weight, old in zip(self.weigh(groups), stale, strict=True)]
        found = [weights for record in kept for weights in record.weights]
        self.notes.differences += compare_turns("weight", step, kept, found, wanted, EXACT)
        self.count += 1

    def end(self) -> None:
        self.notes.checked.append(f"token weights of {self.count} steps, to {EXACT:g} of the largest of each")


class CheckCredit:
    """Credit as the recipe's estimator gives it for the groups of each step."""

    def __init__(self, past: RecordedRun, asked: Asked, notes: Notes) -> None:
        self.name, self.estimate = past.recipe.credit.name, choices.estimate_of(past.recipe)
        self.asked = asked
        self.tolerance = SCORED if asked.needed else EXACT
        self.notes = notes
        self.count = self.left_out = 0

    def step(self, step: int, records: Sequence[Record]) -> None:
        kept = [record for record in records if record.kept]
        groups = [record.group for record in kept]
        scores = self.asked.scores(step, list(turns_of(groups)))
        if scores is None:
            self.left_out += 1
            return
        found = [credit for record in kept for credit in record.credit]
        wanted = self.estimate(groups, scores)
        self.notes.differences += compare_turns("credit", step, kept, found, wanted, self.tolerance)
        self.count += 1

    def end(self) -> None:
        if self.count:
            how = f"by {self.name}, to {self.tolerance:g} of the largest of each"
            self.notes.checked.append(f"credit of {self.count} steps {how}")
        if self.left_out:
            what = " and ".join(sorted(self.asked.needed))
            self.notes.unchecked.append(
                f"credit of {self.left_out} steps: {self.name} needs {what} as of the step before, and the models are "
                "not there any more or --tokens is used up"
            )


def scores_for_credit(recipe: Recipe) -> frozenset[str]:
    """What models have to say before credit can be computed."""
    of_charge = choices.needs(recipe) & {"reference", "old"} if choices.charges_kl(recipe) else frozenset()
    return ESTIMATORS[recipe.credit.name].needs | of_charge


class Asked:
    """Models of a run, asked again for the scores that a step's credit was computed from."""

    def __init__(
        self, past: RecordedRun, checkpoints: Sequence[Checkpoint], needed: frozenset[str], max_tokens: int
    ) -> None:
        self.past = past
        self.by_step = {checkpoint.step: checkpoint for checkpoint in checkpoints}
        self.needed = needed
        self.left = max_tokens
        self.changes = bool(needed & {"old", "values"})
        """Whether scores are of models that training changes, so that the checkpoint before the step is needed."""
        self.learners: dict[int, Learner] = {}

    def scores(self, step: int, turns: Sequence[Turn]) -> dict[str, PerTurn] | None:
        """Scores as of a step's beginning; None where nobody can tell."""
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
            except OSError:  # the reference or the teacher is not there any more
                return None
        learner = self.learners[version]
        return {name: learner.score(plans, len(turns), name) for name in sorted(self.needed)}


def learner_at(past: RecordedRun, checkpoint: Checkpoint) -> Learner:
    """The learner of a run as a checkpoint left it, in this process and on the CPU."""
    recipe = here(past.recipe)
    folder = past.folder.reference if recipe.lora.rank else checkpoint.path
    start = partial(load_model, past.folder.reference)
    learner = rl_learner(recipe, load_model(folder), load_tokenizer(checkpoint.path), start)
    learner.restore(checkpoint.path)
    return learner


def here(recipe: Recipe) -> Recipe:
    """The recipe, computed by one process on the CPU."""
    return recipe.model_copy(
        update={"cluster": ClusterConfig(), "model": recipe.model.model_copy(update={"device": "cpu"})}
    )


def lay_out(recipe: Recipe, turns: Sequence[Turn]) -> list[Plan]:
    return LAYOUTS[recipe.layout](turns, recipe.max_tokens_per_microbatch)


# ---------------------------------------------------------------- tokens and logprobs


class CheckTexts:
    """Every action beside the message that was made of it."""

    def __init__(self, past: RecordedRun, model: Any, notes: Notes) -> None:
        self.driven = {entry.label for entry in past.recipe.env if entry.is_driven}
        self.renderer = renderer_of(past.recipe, model, load_tokenizer(past.checkpoint.path))
        self.notes = notes
        self.count = 0

    def step(self, step: int, records: Sequence[Record]) -> None:
        for place, dataset, turn in placed(records):
            if dataset in self.driven or not len(turn.action):
                continue
            self.count += 1
            if self.renderer.said(turn.prompt, turn.action) != turn.said:
                self.notes.differences.append(f"step {step}, {place}: its tokens do not say what is recorded as said")

    def end(self) -> None:
        self.notes.checked.append(f"tokens of {self.count:,} turns against their text")
        if self.driven:
            names = ", ".join(sorted(self.driven))
            self.notes.unchecked.append(f"tokens against text of {names}, where an agent puts them together")


class CheckLogprobs:
    """Logprobs as the checkpoints give them that have sampled the tokens."""

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
        for place, _, turn in placed(records):
            self.total += len(turn.action)
            if len(turn.action) and (turn.versions == turn.versions[0]).all():  # whole, so that one model can tell
                by_version.setdefault(int(turn.versions[0]), []).append((place, turn))
        for version, found in by_version.items():
            if version in self.by_step:
                self.compare(step, version, found)

    def compare(self, step: int, version: int, found: Sequence[tuple[str, Turn]]) -> None:
        plans = lay_out(self.recipe, [turn for _, turn in found])
        self.left -= sum(plan.num_tokens for plan in plans)
        if self.left < 0:
            return
        for (place, turn), now in zip(found, self.scorer_of(version).score(plans, len(found)), strict=True):
            gap = np.abs(now.astype(np.float64) - turn.logprobs)
            worst = int(np.argmax(np.where(np.isnan(gap), math.inf, gap)))
            self.count += len(gap)
            if gap[worst] <= self.tolerance:
                self.largest = max(self.largest, float(gap[worst]))
                continue
            self.notes.differences.append(
                f"step {step}, {place}: token {worst} has logprob {turn.logprobs[worst]:.6f}, and {now[worst]:.6f} by "
                f"the checkpoint of step {version} that sampled it"
            )

    def scorer_of(self, version: int) -> Learner:
        """A learner that scores with the weights of a checkpoint; one at a time is in memory."""
        if self.scorer is None or self.scorer[0] != version:
            policy = policy_of(here(self.recipe), load_model(self.by_step[version].path))
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
                f"logprobs of {self.total - self.count:,} tokens, whose weights have no checkpoint any more, or "
                "--tokens is used up"
            )


# ---------------------------------------------------------------- places


def compare_turns(
    what: str, step: int, kept: Sequence[Record], found: PerTurn, wanted: PerTurn, tolerance: float
) -> Iterator[str]:
    """A line for each turn in which a number is not the one that is wanted."""
    largest = max((float(np.abs(values).max(initial=0.0)) for values in wanted), default=0.0)
    places = [place for place, _ in trained(kept)]
    for place, values, right in zip(places, found, wanted, strict=True):
        off = np.abs(values.astype(np.float64) - np.asarray(right).astype(np.float32))
        if len(off) and not off.max() <= tolerance * largest:
            worst = int(np.argmax(np.where(np.isnan(off), math.inf, off)))
            yield (
                f"step {step}, {place}: token {worst} has {what} {values[worst]:.6g}, and {right[worst]:.6g} by the "
                "recipe"
            )


def trained(kept: Sequence[Record]) -> Iterator[tuple[str, Turn]]:
    """(place, turn) of `turns_of` the groups that were trained on."""
    for number, record in enumerate(kept):
        for attempt, trajectory in enumerate(record.group.trajectories):
            for place, turn in enumerate(trajectory.turns):
                yield name_of(number, record, attempt, place), turn


def placed(records: Sequence[Record]) -> Iterator[tuple[str, str, Turn]]:
    """(place, dataset, turn) of every turn that is recorded."""
    for number, record in enumerate(records):
        attempts: tuple[Trajectory, ...] = (*record.group.trajectories, *record.group.failed)
        for attempt, trajectory in enumerate(attempts):
            for place, turn in enumerate(trajectory.turns):
                yield name_of(number, record, attempt, place), record.group.task.dataset, turn


def name_of(number: int, record: Record, attempt: int, turn: int) -> str:
    """Where a turn is; all count from 0, as in the archive."""
    return f"group {number} (task {record.group.task.id}), attempt {attempt}, turn {turn}"
