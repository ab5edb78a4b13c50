"""`turnwise.train`: what `turnwise train` does, from Python."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.api.background import Background
from turnwise.api.callbacks import Callbacks, OnCheckpoint, OnEvaluation, OnStep
from turnwise.api.given_environment import GivenEnvironment, named, with_environment
from turnwise.api.recipe_tree import RecipeTree
from turnwise.api.run_record import RunRecord, load_run
from turnwise.api.screens import screen_of
from turnwise.cli.events import events
from turnwise.envs.live import lent
from turnwise.recipe.schema import Recipe
from turnwise.runs.folder import RunFolder
from turnwise.runs.trust import Trust
from turnwise.training.run import Run
from turnwise.training.warm_start import Stopped

GivenRecipe = RecipeTree | Recipe | str | Path
"""A recipe, its file, or the name of one that comes with turnwise."""


def train(
    recipe: GivenRecipe | None = None,
    *,
    environment: GivenEnvironment | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    changes: Sequence[str] = (),
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    trust: bool = False,
    show: bool = True,
) -> RunRecord:
    """Train a recipe, or go on with the run in a folder (`resume`): the run, with all that it recorded. `changes` are
    keys that may change on a resume, as on the command line: ["steps=100"].

    `environment` is a class, a function that makes one environment, a name, or a mapping from datasets to these.
    Callbacks are called in this thread, after what they hear of is recorded, and the run waits for them. One that
    returns `turnwise.STOP` stops the run with a checkpoint; so does one that raises, and the error is raised here. An
    interruption stops the run after its step with a checkpoint, and the second at once.
    """
    for name, callback in (("on_step", on_step), ("on_evaluation", on_evaluation), ("on_checkpoint", on_checkpoint)):
        if inspect.iscoroutinefunction(callback):
            raise ValueError(f"{name} is a coroutine function; use await turnwise.train_async(...) for it")
    job = job_of(recipe, environment, out, resume, changes, trust, show)
    background, callbacks = job.begin(on_step, on_evaluation, on_checkpoint)
    try:
        background.attend()
    except (asyncio.CancelledError, Stopped, KeyboardInterrupt):
        raise KeyboardInterrupt(job.farewell) from None
    return job.result(callbacks)


async def train_async(
    recipe: GivenRecipe | None = None,
    *,
    environment: GivenEnvironment | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    changes: Sequence[str] = (),
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    trust: bool = False,
    show: bool = True,
) -> RunRecord:
    """`train` for a running event loop, which goes on meanwhile. Callbacks may be coroutine functions and are called in
    that loop. Cancelling it ends the run at once, as its last checkpoint left it."""
    job = job_of(recipe, environment, out, resume, changes, trust, show)
    background, callbacks = job.begin(on_step, on_evaluation, on_checkpoint)
    await background.attend_in_loop()
    return job.result(callbacks)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A run that is to be made, or gone on with."""

    folder: Path
    live: Mapping[str, Any]
    """Classes that its recipe names and no module has."""
    ready: Callable[..., AbstractAsyncContextManager[Run]]
    """Opens it, given what asks it to stop."""

    @property
    def farewell(self) -> str:
        return f'stopped; go on with turnwise.train(resume="{self.folder}")'

    def begin(
        self, on_step: OnStep | None, on_evaluation: OnEvaluation | None, on_checkpoint: OnCheckpoint | None
    ) -> tuple[Background[Any], Callbacks]:
        background = Background(lambda background: self.work(background, callbacks))
        callbacks = Callbacks(background, on_step, on_evaluation, on_checkpoint)
        return background, callbacks

    async def work(self, background: Background[Any], callbacks: Callbacks) -> Any:
        with lent(self.live), events(self.folder), same_threads():
            async with self.ready(stop=background.stop) as run:
                run.tell = callbacks.tell
                background.has_something_to_lose = run.last_checkpoint >= 0
                return await run.to_end(background.stop)

    def result(self, callbacks: Callbacks) -> RunRecord:
        if callbacks.errors:
            error = callbacks.errors[0]
            error.add_note(f"a callback raised this, and the run {self.farewell}")
            raise error
        return load_run(self.folder)


def job_of(
    recipe: GivenRecipe | None,
    environment: GivenEnvironment | None,
    out: str | Path | None,
    resume: str | Path | None,
    changes: Sequence[str],
    trust: bool,
    show: bool,
) -> TrainingJob:
    """The run that somebody asks for; what contradicts itself is refused."""
    from turnwise.assemble.run import resuming, training

    screen = screen_of(show)
    if resume is not None:
        if recipe is not None or out is not None:
            raise ValueError("resume takes recipe and folder from the run; remove the recipe and out")
        folder = RunFolder.open(resume)
        _, live = with_environment(folder.read_config(), environment)
        ready = partial(resuming, folder.path, screen, overrides=changes, trust=trust_of(trust))
        return TrainingJob(folder.path, live, ready)
    if recipe is None:
        raise ValueError("give a recipe, for instance turnwise.Recipe(steps=10), or a run with resume=...")
    if trust:
        raise ValueError("trust goes with resume: a recipe that you give is yours; remove it")
    if changes:
        raise ValueError("changes go with resume; change the recipe with recipe.change(...)")
    tree = tree_of(recipe)
    found = named(tree if out is None else tree.change(out=str(out)), environment)
    return TrainingJob(Path(found.recipe.out), found.live, partial(training, found.recipe, screen))


def trust_of(granted: bool) -> Trust:
    return "granted" if granted else "ask"


def tree_of(recipe: GivenRecipe) -> RecipeTree:
    if isinstance(recipe, RecipeTree):
        return recipe
    if isinstance(recipe, Recipe):
        return RecipeTree.of(recipe)
    if isinstance(recipe, (str, Path)):
        return RecipeTree.load(recipe)
    raise ValueError(f"a recipe is a turnwise.Recipe, a file or a name, got {type(recipe).__name__}")


@contextmanager
def same_threads() -> Iterator[None]:
    """Leave torch with as many threads as before: a run chooses its own, and whoever started it goes on afterwards."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
