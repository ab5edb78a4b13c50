"""`turnwise.evaluate`: what `turnwise eval` does, from Python."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.api.background import Background
from turnwise.api.given_environment import GivenEnvironment, named, with_environment
from turnwise.api.recipe_tree import RecipeTree
from turnwise.api.run_record import RunRecord
from turnwise.api.screens import screen_of
from turnwise.api.train import GivenRecipe, same_threads, tree_of, trust_of
from turnwise.cli.events import events
from turnwise.envs.live import lent
from turnwise.evaluation.report import EvaluationReport
from turnwise.evaluation.target import EvaluationTarget
from turnwise.recipe.schema import Recipe
from turnwise.runs.folder import RunFolder
from turnwise.types import Task

GivenTarget = RunRecord | RecipeTree | Recipe | str | Path
"""A run, the folder of a run or of a model, or a recipe."""
GivenTasks = int | Sequence[Task] | str | Path
"""How many held-out tasks of each dataset, the tasks themselves, or a file of them."""


def evaluate(
    target: GivenTarget,
    *,
    recipe: GivenRecipe | None = None,
    environment: GivenEnvironment | None = None,
    checkpoint: int | None = None,
    tasks: GivenTasks | None = None,
    attempts: int | None = None,
    out: str | Path | None = None,
    trust: bool = False,
    show: bool = True,
) -> EvaluationReport:
    """Attempts at held-out tasks, sampled and greedily, by the model of a run, of a folder or of a recipe.

    A run is evaluated under its own recipe, or another; the folder of a model needs one. `environment` is the class of
    a run that was trained on one of a session. Every attempt is left in a folder, `out` or a new one.
    """
    job = EvaluationJob(target, recipe, environment, checkpoint, tasks, attempts, out, trust, show)
    try:
        return Background(job.work).attend()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def evaluate_async(
    target: GivenTarget,
    *,
    recipe: GivenRecipe | None = None,
    environment: GivenEnvironment | None = None,
    checkpoint: int | None = None,
    tasks: GivenTasks | None = None,
    attempts: int | None = None,
    out: str | Path | None = None,
    trust: bool = False,
    show: bool = True,
) -> EvaluationReport:
    """`evaluate` for a running event loop, which goes on meanwhile."""
    job = EvaluationJob(target, recipe, environment, checkpoint, tasks, attempts, out, trust, show)
    return await Background(job.work).attend_in_loop()


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """An evaluation that is to be made."""

    target: GivenTarget
    recipe: GivenRecipe | None
    environment: GivenEnvironment | None
    checkpoint: int | None
    tasks: GivenTasks | None
    attempts: int | None
    out: str | Path | None
    trust: bool
    show: bool

    async def work(self, background: Background[EvaluationReport]) -> EvaluationReport:
        from turnwise.assemble.checks import check
        from turnwise.assemble.evaluation import evaluate_target

        target, live = self.found()
        with lent(live):
            check(target.recipe)
            tasks = self.tasks_of(target.recipe)
            folder = target.make_folder(None if self.out is None else str(self.out))
            with events(folder), same_threads():
                try:
                    return await evaluate_target(target, tasks, folder, screen_of(self.show))
                finally:
                    if not any(folder.iterdir()):
                        folder.rmdir()

    def found(self) -> tuple[EvaluationTarget, Mapping[str, Any]]:
        """(what is evaluated, the classes that its recipe names and no module has)."""
        what = self.target.path if isinstance(self.target, RunRecord) else self.target
        changes, trust = self.changes(), trust_of(self.trust)
        if not isinstance(what, (str, Path)) or not Path(what).is_dir():
            if self.recipe is not None or self.checkpoint is not None:
                raise ValueError("recipe and checkpoint go with the folder of a run or of a model; remove them")
            given = named(tree_of(what).change(*changes), self.environment)
            home = Path(f"{given.recipe.out}-eval")
            return EvaluationTarget("the model of the recipe", given.recipe, None, 0, home), given.live
        if self.recipe is not None:
            given = named(tree_of(self.recipe).change(*changes), self.environment)
            target = EvaluationTarget.find(str(what), given.recipe, self.checkpoint, (), trust)
            return target, given.live
        _, live = with_environment(RunFolder.open(what).read_config(), self.environment)
        return EvaluationTarget.find(str(what), None, self.checkpoint, changes, trust), live

    def changes(self) -> list[str]:
        """The keys of the recipe that the arguments stand for."""
        count = self.tasks if isinstance(self.tasks, int) else None
        asked = {"evaluation.attempts": self.attempts, "evaluation.final_tasks": count}
        return [f"{key}={value}" for key, value in asked.items() if value is not None]

    def tasks_of(self, recipe: Recipe) -> list[Task]:
        from turnwise.assemble.environments import checked, read_tasks, tasks_of

        if isinstance(self.tasks, (str, Path)):
            return read_tasks(recipe, Path(self.tasks))
        if self.tasks is None or isinstance(self.tasks, int):
            heldout = tasks_of(recipe, "heldout", recipe.evaluation.final_tasks)
            return [task for tasks in heldout.values() for task in tasks]
        labels = [entry.label for entry in recipe.env]
        for task in self.tasks:
            if not isinstance(task, Task) or task.dataset not in labels:
                raise ValueError(f"tasks are Task values of the datasets {', '.join(labels)}, got {task!r}")
        return [checked(task, task.dataset) for task in self.tasks]
