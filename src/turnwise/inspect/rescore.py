"""Recorded attempts scored again: an environment of today hears what was said in them, and pays for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.assemble import objective as choices
from turnwise.assemble.attempts import limits
from turnwise.assemble.engines import engine_of_nobody
from turnwise.assemble.run import settings_of
from turnwise.engines.base import Sampling
from turnwise.inspect.attempts import TRAINING, AttemptKey
from turnwise.inspect.audit import scores_for_credit
from turnwise.inspect.rescore_report import RescoredAttempt, RescoreReport
from turnwise.inspect.run_reader import RunReader, TokenText
from turnwise.learn.tiny import build_tokenizer
from turnwise.messages import Message
from turnwise.recipe.schema import Recipe
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.environments import Environments
from turnwise.rollout.open_limit import EnvironmentMaker
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.replayed import Opening, ReplayedAttempt
from turnwise.rollout.scene import Attempt, Scene
from turnwise.runs.archive import Record, write_step
from turnwise.runs.recorded_archive import RecordedArchive, names_of_steps
from turnwise.runs.screen import Screen
from turnwise.training.loop import is_stale, split_by
from turnwise.types import Group, Status, Task, Trajectory, turns_of

Found = tuple[Trajectory, str]
"""An attempt as it is paid now, and where it would have differed."""
Numbered = tuple[int, Record]
"""A record with its place in its step."""
DRIVEN = "an agent drives them, and what the model said went to the agent, not to the environment"


@dataclass(frozen=True, slots=True)
class Rescorer:
    """Scores recorded attempts in new environments, many at once.

    Example:
        await rescorer.record(12, 3, record)
    """

    makers: dict[str, EnvironmentMaker]
    """By dataset; one without a maker is left out."""
    scene: Scene
    settle: Callable[[Group], Group]
    """What becomes of attempts that failed."""
    is_opening: Opening
    seed: int = 0
    retries: int = 0

    async def record(self, step: int, number: int, record: Record) -> tuple[Group, list[RescoredAttempt]]:
        """(a group with its new rewards, each attempt before and after)."""
        task, attempts = record.group.task, (*record.group.trajectories, *record.group.failed)
        found = await all_of(self.one(task, place, attempt) for place, attempt in enumerate(attempts))
        lines = [
            RescoredAttempt(
                AttemptKey(TRAINING, step, number, place),
                task.id,
                before.total,
                after.total,
                before.status,
                after.status,
                difference,
                after.failure,
            )
            for place, (before, (after, difference)) in enumerate(zip(attempts, found, strict=True))
        ]
        return grouped(task, [after for after, _ in found]), lines

    async def one(self, task: Task, number: int, recorded: Trajectory) -> Found:
        """One attempt, played again. One in which nothing was said stays as it is."""
        if not recorded.turns:
            return recorded, ""
        which = Attempt(self.seed, "rescore", task, 0, number)
        for retry in range(self.retries + 1):
            replayed = ReplayedAttempt(recorded, self.is_opening)
            found = await run_attempt(replace(which, retry=retry), self.makers[task.dataset], self.scene, replayed)
            if found.status not in (Status.failed, Status.timed_out):
                break
        settled = self.settle(grouped(task, [found]))
        return (*settled.trajectories, *settled.failed)[0], replayed.difference


def grouped(task: Task, attempts: Sequence[Trajectory]) -> Group:
    """A group of attempts, of which some may not count."""
    counts = tuple(attempt for attempt in attempts if attempt.status.counts)
    return Group(task, counts, tuple(attempt for attempt in attempts if not attempt.status.counts))


def rescorer_of(recipe: Recipe, environments: Environments, texts: TokenText) -> Rescorer:
    """What scores attempts in the environments of a recipe; `texts` reads the first prompts."""
    driven = {entry.label for entry in recipe.env if entry.is_driven}
    renderer = Renderer(build_tokenizer([]))  # nothing is rendered
    return Rescorer(
        {label: maker for label, maker in environments.training().items() if label not in driven},
        Scene(engine_of_nobody(renderer), renderer, Sampling(max_tokens=1), limits(recipe)),
        choices.failure_of(recipe),
        opening_by(texts),
        recipe.seed,
        recipe.rollout.failures.retries,
    )


def opening_by(texts: TokenText) -> Opening:
    """Whether an attempt's first prompt has the text of messages; always so where nobody can read the prompt."""

    def is_opening(recorded: Trajectory, messages: tuple[Message, ...]) -> bool:
        if texts.tokenizer is None:
            return True
        prompt = texts.text(recorded.turns[0].prompt)
        return all(message.content.strip() in prompt for message in messages)

    return is_opening


# ---------------------------------------------------------------- a whole run


async def rescore(
    recipe: Recipe,
    source: RecordedArchive,
    environments: Environments,
    screen: Screen,
    limit: int | None = None,
    archive: Path | None = None,
) -> RescoreReport:
    """Score the attempts of a run again, whole groups until there are `limit` attempts, and write the groups with their
    new rewards into the folder `archive`, where one is given."""
    texts = RunReader(source.folder).text_of
    rescorer = rescorer_of(recipe, environments, texts)
    attempts: list[RescoredAttempt] = []
    notes = [] if texts.tokenizer else ["first observations were not compared: no checkpoint has the tokenizer"]
    done: list[int] = []
    screen.begin("rescoring", len(source.steps))
    try:
        for step in source.steps:
            left = None if limit is None else limit - len(attempts)
            chosen = some_of(recipe, list(enumerate(source.read(step))), left)
            playable = [(number, record) for number, record in chosen if record.group.task.dataset in rescorer.makers]
            if len(playable) < len(chosen):
                notes.append(f"{len(chosen) - len(playable)} groups of step {step} are left out: {DRIVEN}")
            found = await all_of(rescorer.record(step, number, record) for number, record in playable)
            attempts += [line for _, lines in found for line in lines]
            if archive is not None:
                notes += write_rescored(recipe, archive, step, [group for group, _ in found])
            environments.failures.sum_up(f"step {step}")
            done.append(step)
            screen.show(len(done), {})
            if limit is not None and len(attempts) >= limit:
                break
    finally:
        screen.end()
    if not attempts:
        raise ValueError(
            f"{source.folder.path} has no attempt that can be scored again{'; ' if notes else ''}{'; '.join(notes)}"
        )
    names = ", ".join(
        entry.label if entry.label == entry.name else f"{entry.label} ({entry.name})" for entry in recipe.env
    )
    title = f"{names_of_steps(done)} of {source.folder.path}, scored again by {names}"
    return RescoreReport(title, tuple(attempts), recipe.rollout.success_threshold, tuple(dict.fromkeys(notes)))


def some_of(recipe: Recipe, records: Sequence[Numbered], limit: int | None) -> list[Numbered]:
    """The first records of a step that have so many attempts. ValueError for a dataset that nobody can open."""
    labels, chosen, count = [entry.label for entry in recipe.env], [], 0
    for number, record in records:
        if limit is not None and count >= limit:
            break
        group = record.group
        if group.task.dataset not in labels:
            raise ValueError(
                f"task {group.task.id} is of the dataset {group.task.dataset}, and the environments of the recipe are "
                f"{', '.join(labels)}; give an environment that dataset with env.0.dataset={group.task.dataset}"
            )
        chosen.append((number, record))
        count += len(group.trajectories) + len(group.failed)
    return chosen


def write_rescored(recipe: Recipe, archive: Path, step: int, groups: Sequence[Group]) -> list[str]:
    """Write the groups of a step with their new rewards: what there is to say about it."""
    records, note = credited(recipe, step, groups)
    write_step(archive, step, records)
    return [note] if note else []


def credited(recipe: Recipe, step: int, groups: Sequence[Group]) -> tuple[list[Record], str]:
    """(the groups with the credit and the token weights that the recipe gives them, or, where it takes models to
    compute credit, as groups that were not trained on; why they have no credit)."""
    dropped = [Record(group, False) for group in groups]
    if needed := scores_for_credit(recipe):
        return dropped, f"groups are written without credit, for which models would have to give {min(needed)}"
    keep, settings = choices.keep_of(recipe), settings_of(recipe)
    kept = [group for group in groups if keep(group)]
    try:
        credit = choices.estimate_of(recipe)(kept, {})
    except ValueError as error:
        return dropped, f"groups of step {step} are written without credit: {error}"
    weights: list[Any] = []
    for start in range(0, len(kept), settings.groups_per_update):
        batch = kept[start : start + settings.groups_per_update]
        stale = is_stale(list(turns_of(batch)), step - 1, settings)
        weigh = choices.weighting_of(recipe)
        weights += [weight * (not old) for weight, old in zip(weigh(batch), stale, strict=True)]
    sizes = [len(list(turns_of([group]))) for group in kept]
    trained = iter(zip(split_by(credit, sizes), split_by(weights, sizes), strict=True))
    return [
        Record(group, True, *map(narrow, next(trained))) if keep(group) else Record(group, False) for group in groups
    ], ""


def narrow(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(np.asarray(array, np.float32) for array in arrays)
