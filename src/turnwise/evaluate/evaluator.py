"""Exams of a run: held-out attempts on one version of the weights, in place of training or beside it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turnwise.assemble.run import exam_of
from turnwise.engines.base import Engine
from turnwise.evaluate.result import Result, evaluate
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environment_host import EnvironmentHost
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Play
from turnwise.runs.evaluations import write_evaluation
from turnwise.schedule.shared_failure import SharedFailureCheck
from turnwise.types import Group, Task

log = logging.getLogger(__name__)
NOBODY: Mapping[str, Play] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Exam:
    """An exam that was made, and where its attempts are."""

    version: int
    """Of the weights that made all of it."""
    kind: str
    """How it was sampled: sampled or greedy."""
    result: Result
    seconds: float
    path: Path

    @property
    def metrics(self) -> dict[str, float]:
        found = self.result.metrics(self.version)
        return {f"eval/{self.kind}/{key}": value for key, value in found.items()} | {
            f"seconds/exam/{self.kind}": self.seconds
        }


def omen_of(recipe: Recipe, tasks: Sequence[Task], *, greedy: bool) -> Callable[[Group], None]:
    """What stops an exam that only fails. Where failures are paid they are the policy's own, and say nothing."""
    if recipe.rollout.on_failure.name != "drop":
        return lambda group: None
    return SharedFailureCheck(tasks, 1 if greedy else recipe.evaluation.attempts)


class Examiner:
    """Makes exams by an engine and leaves their attempts in a folder. One may go on by itself, from when it is begun
    until it is collected: where the engine is not the one that trains, nothing it does can touch its weights.

    Example:
        examiner = Examiner(recipe, engine, renderer, batches, Path("runs/hops-0/evaluations"))
        exam = await examiner.exam(version, tasks, greedy=True)
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        renderer: Renderer,
        batches: Mapping[str, EnvironmentHost],
        folder: Path,
        plays: Mapping[str, Play] = NOBODY,
    ) -> None:
        self.recipe = recipe
        self.engine = engine
        self.renderer = renderer
        self.batches = batches
        self.folder = folder
        self.plays = plays
        self.under_way: asyncio.Task[Exam] | None = None

    async def exam(
        self,
        version: int,
        tasks: Sequence[Task],
        *,
        greedy: bool,
        weights: Mapping[str, Any] | None = None,
        seen: Callable[[Group], None] = lambda group: None,
    ) -> Exam:
        """An exam of a version, which the engine has, or is given by these weights."""
        if weights is not None:
            await self.engine.load(weights, version)
        began = time.perf_counter()
        practice = exam_of(self.recipe, self.engine, self.renderer, self.batches, self.plays, greedy=greedy)
        success_at = self.recipe.rollout.success_at
        result = await evaluate(practice, tasks, success_at, seen)
        assert result.versions <= {version}, f"an exam of version {version} was sampled by {sorted(result.versions)}"
        # A run that resumes here has not made this exam: training must not profit from prefixes it computed.
        await self.engine.forget()
        kind = "greedy" if greedy else "sampled"
        path = write_evaluation(self.folder, version, kind, result.groups, success_at, self.renderer.decode)
        return Exam(version, kind, result, time.perf_counter() - began, path)

    async def begin(
        self,
        version: int,
        tasks: Sequence[Task],
        weights: Mapping[str, Any],
        seen: Callable[[Group], None] = lambda group: None,
    ) -> None:
        """Have a sampled exam go on by itself. When this returns, the weights have been copied and may change."""
        assert self.under_way is None, "one exam at a time: collect the one before first"
        await self.engine.load(weights, version)
        work = self.exam(version, tasks, greedy=False, seen=seen)
        self.under_way = asyncio.create_task(work, name=f"exam of version {version}")

    async def collect(self, *, wait: bool) -> Exam | None:
        """The exam that was begun, once it has ended; None where there is none. An error in it is raised here."""
        if self.under_way is None or not (wait or self.under_way.done()):
            return None
        exam = await self.under_way
        self.under_way = None
        return exam

    async def close(self) -> None:
        """Give up an exam that goes on, its environments closed, and the engine."""
        if self.under_way is not None:
            self.under_way.cancel()
            [ended] = await asyncio.gather(self.under_way, return_exceptions=True)
            if isinstance(ended, Exception):
                log.warning("%s failed: %s", self.under_way.get_name(), ended)
            self.under_way = None
        await self.engine.close()
