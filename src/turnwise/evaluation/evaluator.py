"""Evaluations of a run: held-out attempts on one version of the weights, while training waits or goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.engines.base import Engine
from turnwise.evaluation.result import Result, evaluate
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.group import GroupMaker
from turnwise.runs.evaluations import write_evaluation
from turnwise.schedule.shared_failure import SharedFailureCheck
from turnwise.schedule.workers import Worker, inline
from turnwise.types import Group, Task

log = logging.getLogger(__name__)

Seen = Callable[[Group], None]
"""Called with each group of an evaluation once it is made."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation that was made, and where its attempts are."""

    version: int
    """Of the weights that made all of it."""
    kind: str
    """How it was sampled: sampled or greedy."""
    result: Result
    seconds: float
    """From its start to its last attempt; those of another kind that were made at the same time took a part of it."""
    path: Path

    @property
    def metrics(self) -> dict[str, float]:
        of_result = self.result.metrics(self.version)
        return {f"eval/{self.kind}/{key}": value for key, value in of_result.items()} | {
            f"seconds/evaluation/{self.kind}": self.seconds
        }


class Evaluator:
    """Makes evaluations with an engine and leaves their attempts in a folder. One may go on while training does, from
    when it is begun until it is collected: where the engine is not the one of training, no step can touch its weights.

    Example:
        evaluator = Evaluator(engine, attempts, Path("runs/hops-0/evaluations"), success_at=1.0, decode=renderer.decode)
        evaluation = await evaluator.evaluate(version, tasks, greedy=True)
    """

    def __init__(
        self,
        engine: Engine,
        attempts: Callable[[bool], GroupMaker],
        folder: Path,
        *,
        success_at: float,
        decode: Callable[[Sequence[int]], str],
        stops_when_hopeless: bool = True,
        record: Worker = inline,
    ) -> None:
        """`attempts` makes them, greedily or sampled, and `record` has them written. Where failures are paid, they are
        the policy's own doing, and an evaluation in which all attempts fail alike must not stop the run."""
        self.engine = engine
        self.attempts = attempts
        self.folder = folder
        self.success_at = success_at
        self.decode = decode
        self.stops_when_hopeless = stops_when_hopeless
        self.record = record
        self.under_way: asyncio.Task[Evaluation] | None = None

    async def evaluate(
        self,
        version: int,
        tasks: Sequence[Task],
        *,
        greedy: bool,
        weights: Mapping[str, Any] | None = None,
        seen: Seen = lambda group: None,
    ) -> Evaluation:
        """An evaluation of a version, which the engine has, or is given by these weights."""
        [evaluation] = await self.evaluate_together(version, tasks, [greedy], weights=weights, seen=seen)
        return evaluation

    async def evaluate_together(
        self,
        version: int,
        tasks: Sequence[Task],
        kinds: Sequence[bool],
        *,
        weights: Mapping[str, Any] | None = None,
        seen: Seen = lambda group: None,
    ) -> list[Evaluation]:
        """One evaluation for each kind, greedy or not, all made at once: their attempts share passes and prompts."""
        if weights is not None:
            await self.engine.load(weights, version)
        evaluations = await all_of(self.made(version, tasks, greedy, seen) for greedy in kinds)
        # A run that resumes here has not made this evaluation: training must not profit from prefixes it computed.
        await self.engine.forget()
        return evaluations

    async def made(self, version: int, tasks: Sequence[Task], greedy: bool, seen: Seen) -> Evaluation:
        began = time.perf_counter()
        attempts = self.attempts(greedy)
        result = await evaluate(attempts, tasks, self.success_at, self.watched(tasks, attempts, seen))
        strangers = result.versions - {version}
        assert not strangers, f"an evaluation of version {version} was sampled by {sorted(strangers)}"
        kind = "greedy" if greedy else "sampled"
        path = await self.record(
            write_evaluation, self.folder, version, kind, result.groups, self.success_at, self.decode
        )
        return Evaluation(version, kind, result, time.perf_counter() - began, path)

    def watched(self, tasks: Sequence[Task], attempts: GroupMaker, seen: Seen) -> Seen:
        """What sees each group: the caller, and what stops an evaluation that only fails."""
        if not self.stops_when_hopeless:
            return seen
        shared_failure = SharedFailureCheck(tasks, attempts.attempts)

        def both(group: Group) -> None:
            seen(group)
            shared_failure(group)

        return both

    async def begin(self, version: int, tasks: Sequence[Task], weights: Mapping[str, Any]) -> None:
        """Start a sampled evaluation that goes on while training does. When this returns, the weights have been copied
        and may change."""
        assert self.under_way is None, "one evaluation at a time: collect the one before first"
        await self.engine.load(weights, version)
        work = self.evaluate(version, tasks, greedy=False)
        self.under_way = asyncio.create_task(work, name=f"evaluation of version {version}")

    async def collect(self, *, wait: bool) -> Evaluation | None:
        """The evaluation that was begun, once it has ended; None where there is none. An error in it is raised
        here."""
        if self.under_way is None or not (wait or self.under_way.done()):
            return None
        evaluation = await self.under_way
        self.under_way = None
        return evaluation

    async def stop(self) -> None:
        """Give up an evaluation that goes on; its environments are closed when this returns."""
        if self.under_way is not None:
            self.under_way.cancel()
            [ended] = await asyncio.gather(self.under_way, return_exceptions=True)
            if isinstance(ended, Exception):
                log.warning("%s failed: %s", self.under_way.get_name(), ended)
            self.under_way = None
