"""A run in its folder: first evaluation, training, last evaluation, and all that it records."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.atomic import write_atomically
from turnwise.evaluation.evaluator import Evaluator
from turnwise.learn.base import AnyStaged
from turnwise.learn.policy import load_model
from turnwise.pretrained import ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environments import Environments
from turnwise.runs import archive, evaluations, tracker
from turnwise.runs.archive import Record
from turnwise.runs.before_after import before_and_after
from turnwise.runs.checkpoint import Checkpoint, checkpoint_path, prune_checkpoints, read_checkpoint, write_checkpoint
from turnwise.runs.curve import draw_curve
from turnwise.runs.describe import describe
from turnwise.runs.folder import RunFolder
from turnwise.runs.screen import Screen
from turnwise.runs.tracker import Tracker
from turnwise.runs.trackers.attempts import rows_of
from turnwise.runs.transcript import best_and_worst
from turnwise.schedule.garbage import collecting_only_new
from turnwise.schedule.run_loop import stall_metrics
from turnwise.schedule.stopping import LearnerLost, NothingKept, RunStopped
from turnwise.schedule.workers import Worker, in_own_thread
from turnwise.tokens import Tokens
from turnwise.training.loop import LoopParts, Progress, Waiting, train
from turnwise.training.moments import Moment, StepDone, Tell, nobody
from turnwise.training.saving import Saving
from turnwise.training.state import State
from turnwise.types import Group, Task

MARK = "eval/greedy/marks/"
WAITING = "waiting"
"""Folder of a checkpoint with the groups that were made and not trained on yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """All that a run works with. Whoever made them closes them."""

    loop: LoopParts
    evaluator: Evaluator | None
    """None where nothing samples, so that nothing is evaluated."""
    environments: Environments
    tokenizer: ChatTokenizer
    save: Worker = field(default_factory=lambda: in_own_thread("checkpoint"))
    """Stages and writes checkpoints."""
    record: Worker = field(default_factory=lambda: in_own_thread("record"))
    """Writes metrics and archive."""
    start_metrics: Mapping[str, float] = field(default_factory=dict)
    """What the weight check has measured before the first step."""


class Run:
    """A training run in its folder.

    Example:
        async with training(recipe, screen, stop) as run:
            summary = await run.to_end(stop)
    """

    def __init__(
        self, recipe: Recipe, folder: RunFolder, parts: RunParts, state: State, screen: Screen, tracker: Tracker
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.parts = parts
        self.state = state
        self.screen = screen
        self.tracker = tracker
        self.since = self.model_seconds()
        self.last_checkpoint = -1
        """Step of the last checkpoint that was staged, whether or not it is written yet."""
        self.saving = Saving(parts.save)
        self.waiting: Waiting = {}
        """By the number of their draw: groups that were made and not trained on yet."""
        self.lap_began = time.perf_counter()
        self.tell: Tell = nobody
        """Hears of every evaluation, checkpoint and step, once it is recorded."""
        self.untold: list[Moment] = []

    # ------------------------------------------------------------ from start to end

    async def to_end(self, stop: asyncio.Event) -> dict[str, Any] | None:
        """Train to the last step: the summary, or None where `stop` came first. A stop, or an error that a resume can
        go on from, leaves a checkpoint behind."""
        try:
            if self.last_checkpoint < 0:
                await self.before()
            try:
                await self.train(stop)
            except RunStopped as error:
                raise RunStopped(f"{error} (a checkpoint is in {self.folder.checkpoints})") from None
        finally:
            await self.saving.quiet()  # before whoever made the learner and locked the folder lets go of them
        return self.finish() if self.state.progress.step == self.recipe.steps else None

    async def before(self) -> None:
        """Evaluate and checkpoint the model that training starts from."""
        with self.timed("evaluate"):
            metrics = await self.full_evaluation()
        self.parts.environments.failures.sum_up("the first evaluation")
        self.state.before = success_of(metrics)
        await self.log(0, {**self.parts.start_metrics, **metrics, **self.parts.environments.report()})
        await self.checkpoint()
        await self.settle()  # a run that cannot write checkpoints shall say so before it trains
        self.since = self.model_seconds()
        if self.state.before:
            self.screen.say(f"before: held-out success {describe_success(self.state.before)}")
        await self.tell_moments()

    async def train(self, stop: asyncio.Event) -> None:
        self.screen.begin("training", self.recipe.steps, self.state.progress.step)
        try:
            if self.state.evaluating is not None:
                await self.begin_evaluation(self.state.evaluating)
            with collecting_only_new():
                await asyncio.sleep(0)
                stall_metrics()  # the start of a run may hold up the loop: nobody else uses it yet
                self.lap_began = time.perf_counter()
                await train(self.parts.loop, self.state.progress, self.after, stop, self.waiting)
        except LearnerLost:
            raise
        except RunStopped as error:
            await self.checkpoint()
            await self.settle()
            if isinstance(error, NothingKept):
                await self.log_dropped(error.dropped)
            await self.tell_moments()
            raise
        finally:
            self.screen.end()
        if self.parts.evaluator is not None:
            await self.parts.evaluator.stop()
        await self.checkpoint()
        await self.settle()
        await self.tell_moments()

    async def after(
        self, progress: Progress, metrics: dict[str, float], records: list[Record], waiting: Waiting
    ) -> None:
        """Evaluate where due, log, archive, checkpoint where due."""
        self.waiting = waiting
        now = self.model_seconds()
        metrics |= {f"seconds/{name}": now[name] - self.since[name] for name in now}
        metrics["speed/tokens_per_second"] = metrics["tokens/sampled"] / metrics["seconds/step"]
        for stage in ("step", "plan_and_credit", "load"):
            self.spend(stage, metrics[f"seconds/{stage}"])
        step, last = progress.step, progress.step == self.recipe.steps
        with self.timed("evaluate"):
            metrics |= await self.evaluate()
        metrics |= self.parts.environments.report()
        self.parts.environments.failures.sum_up(f"step {step}")
        metrics |= stall_metrics()
        with self.timed("record"):
            await self.parts.record(self.write_step, step, metrics, records)
        lap_ended = time.perf_counter()
        self.spend("train", lap_ended - self.lap_began)
        self.lap_began = lap_ended
        if begins := self.recipe.schedule.overlap_evaluations and self.is_due and not last:
            self.state.evaluating = step
        if begins or last or self.state.best_step == step or step % self.recipe.checkpoints.every == 0:
            await self.checkpoint()
        self.note(self.saving.ended())
        if begins:  # after its checkpoint, from which a resume begins it again
            await self.begin_evaluation(step)
        self.since = self.model_seconds()
        self.screen.show(step, metrics)
        if (every := self.recipe.screen.attempts_every) and step % every == 0:
            for line in best_and_worst([record.group for record in records], self.decode):
                self.screen.say(line)
        self.untold.append(StepDone(step, metrics, tuple(records)))
        await self.tell_moments()

    async def tell_moments(self) -> None:
        """Tell what has happened since the last time: evaluations, then checkpoints that were written, then the step.
        All of it is recorded by now. Whoever hears of it can stop the run and lose nothing: its end waits for a
        checkpoint that is being written."""
        moments, self.untold = self.untold, []
        for moment in moments:
            await self.tell(moment)

    def write_step(self, step: int, metrics: Mapping[str, float], records: Sequence[Record]) -> None:
        """Log and archive a step."""
        self.tracker.log(step, metrics)
        if self.recipe.trackers and (step in (1, self.recipe.steps) or step % self.recipe.checkpoints.every == 0):
            self.tracker.log_attempts(step, rows_of([record.group for record in records], self.decode))
        archive.write_step(self.folder.archive, step, records)
        archive.prune(self.folder.archive, self.recipe.archive.steps)
        evaluations.prune(self.folder.evaluations, self.recipe.archive.evaluations, self.state.best_step)

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        await self.parts.record(self.tracker.log, step, metrics)

    async def log_dropped(self, dropped: Sequence[Group]) -> None:
        """Log what the step was like that the run stopped in, for want of a group to train on. A resume makes it
        again."""
        step = self.state.progress.step
        metrics = describe((), dropped, version=step, success_at=self.recipe.rollout.success_threshold)
        await self.parts.record(self.tracker.log_unfinished, step + 1, metrics)

    def finish(self) -> dict[str, Any]:
        """Write summary and curve, and show one attempt before training beside one after."""
        metrics = tracker.read_metrics(self.folder.metrics)
        if not metrics or metrics[-1]["step"] != self.recipe.steps:
            raise ValueError(f"{self.folder.metrics} does not have the last step; restore it from a copy")
        stages = {**self.state.seconds, **dict.fromkeys(self.model_seconds(), 0.0)}
        for line in metrics:
            for name in self.model_seconds():
                stages[name] += line.get(f"seconds/{name}", 0.0)
        summary = {
            "before": self.state.before,
            "after": success_of(metrics[-1]),
            "marks": {"before": marks_of(metrics[0]), "after": marks_of(metrics[-1])},
            "seconds": {name: round(value, 3) for name, value in stages.items()},
            "updates": self.state.progress.updates,
            "lag_max": self.state.progress.lag_max,
        }
        write_atomically(self.folder.summary, json.dumps(summary, indent=2) + "\n")
        draw_curve(metrics, self.folder.curve, f"{', '.join(e.label for e in self.recipe.env)}: success")
        self.tracker.log_curve(self.recipe.steps, self.folder.curve)
        threshold = self.recipe.rollout.success_threshold
        for shown in before_and_after(self.folder.evaluations, self.recipe.steps, threshold):
            self.screen.say(shown)
        return summary

    # ------------------------------------------------------------ evaluations

    async def full_evaluation(self) -> dict[str, float]:
        """Held-out metrics of the live weights before and after training."""
        if self.parts.evaluator is None:
            return {}
        return await self.evaluation((False, True), self.recipe.evaluation.final_tasks)

    async def evaluation(self, kinds: Sequence[bool], count: int) -> dict[str, float]:
        """Metrics of evaluations of the live weights, greedy or not, for which training waits."""
        assert self.parts.evaluator is not None
        version = self.state.progress.step
        made = await self.parts.evaluator.evaluate_together(
            version, self.heldout(count), kinds, weights=await self.weights(version)
        )
        self.untold += made
        return {name: value for evaluation in made for name, value in evaluation.metrics.items()}

    async def begin_evaluation(self, version: int) -> None:
        """Begin an evaluation that overlaps training."""
        assert self.parts.evaluator is not None
        weights = await self.weights(version)
        if weights is None:
            advice = "resume with schedule.overlap_evaluations = true"
            raise ValueError(f"the evaluation of step {version} has not ended; {advice}")
        await self.parts.evaluator.begin(version, self.heldout(self.recipe.evaluation.tasks), weights)

    async def evaluate(self) -> dict[str, float]:
        """Make the evaluation that is due, unless it overlaps training; metrics of those that have ended. One that
        overlaps training is waited for where the next is due."""
        if self.parts.evaluator is None:
            return {}
        step, due, metrics = self.state.progress.step, self.is_due, {}
        if (ended := await self.parts.evaluator.collect(wait=due)) is not None:
            self.state.evaluating, metrics = None, ended.metrics
            self.compare(metrics)
            self.untold.append(ended)
        if step == self.recipe.steps:
            if metrics:  # on a line of its own: those of the last evaluation have the same names
                await self.log(step, metrics)
            metrics = await self.full_evaluation()
        elif due and not self.recipe.schedule.overlap_evaluations:
            kinds = (False, True) if self.recipe.evaluation.greedy else (False,)
            metrics = await self.evaluation(kinds, self.recipe.evaluation.tasks)
        self.compare(metrics)
        return metrics

    @property
    def is_due(self) -> bool:
        """Whether the weights of this step are to be evaluated."""
        step, every = self.state.progress.step, self.recipe.evaluation.every
        return step == self.recipe.steps or bool(every and step % every == 0)

    def compare(self, metrics: Mapping[str, float]) -> None:
        """Remember the version of an evaluation where it is the best so far."""
        success = metrics.get("eval/sampled/success", -1.0)
        if success > self.state.best_success:
            self.state.best_step, self.state.best_success = int(metrics["eval/sampled/version"]), success

    def heldout(self, count: int) -> list[Task]:
        """So many held-out tasks of each dataset."""
        datasets = self.parts.environments.tasks("heldout", self.recipe.evaluation.most_tasks)
        return [task for tasks in datasets.values() for task in tasks[:count]]

    async def weights(self, version: int) -> Mapping[str, Any] | None:
        """What an evaluation has to load for a version: nothing where it shares the engine of training, which has
        it."""
        if self.parts.evaluator is not None and self.parts.evaluator.engine is self.parts.loop.engine:
            return None
        if version == self.state.progress.step:
            published: Mapping[str, Any] = await self.parts.loop.stages.run(self.parts.loop.learner.publish)
            return published
        path = checkpoint_path(self.folder.checkpoints, version)
        if not path.is_dir():
            raise ValueError(f"{path} is not there, and its evaluation has not ended; put it back from a copy")
        model = await self.parts.record(lambda: load_model(read_checkpoint(path).path))
        weights: Mapping[str, Any] = model.state_dict()
        return weights

    # ------------------------------------------------------------ records

    async def checkpoint(self) -> None:
        """Stage the present state, once per step, and begin to write it. The event loop goes on meanwhile, and so does
        training once all is staged. One that is still being written is waited for."""
        step = self.state.progress.step
        if step == self.last_checkpoint:
            return
        with self.timed("record"):
            self.state.waiting = sorted(self.waiting)
            self.state.metrics = await self.parts.record(tracker.seal, self.folder.metrics)
            groups = [Record(self.waiting[number], False) for number in self.state.waiting]
            stay = self.state.best_step, self.state.evaluating
            state = self.state.to_json()

            def write(staged: AnyStaged) -> Checkpoint:
                def write_parts(path: Path) -> None:
                    staged.write(path)
                    archive.write_step(path / WAITING, step, groups)

                path = write_checkpoint(self.folder.checkpoints, step, state, write_parts)
                prune_checkpoints(self.folder.checkpoints, self.recipe.checkpoints.keep, *stay)
                return Checkpoint(path, step, state)

            self.note(await self.saving.save(self.parts.loop.learner, self.parts.tokenizer, write))
        self.last_checkpoint = step

    async def settle(self) -> None:
        """Wait for the checkpoint that is being written."""
        with self.timed("record"):
            self.note(await self.saving.settled())

    def note(self, written: Checkpoint | None) -> None:
        if written is not None:
            self.untold.append(written)

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens, control tokens included."""
        return self.parts.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    def model_seconds(self) -> dict[str, float]:
        """Seconds inside the models so far, by what they did."""
        return {"generate": self.parts.loop.engine.seconds, **self.parts.loop.learner.seconds}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spend(stage, time.perf_counter() - began)

    def spend(self, stage: str, seconds: float) -> None:
        self.state.seconds[stage] = self.state.seconds.get(stage, 0.0) + seconds


def success_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Held-out success by how it was sampled; empty where nothing was evaluated."""
    return {kind: metrics[name] for kind in ("sampled", "greedy") if (name := f"eval/{kind}/success") in metrics}


def marks_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """What the environment's marks say of greedy held-out attempts: how they are made, beside whether they succeed."""
    return {name.removeprefix(MARK): value for name, value in metrics.items() if name.startswith(MARK)}


def describe_success(success: Mapping[str, float]) -> str:
    return f"{success['sampled']:.3f} sampled, {success['greedy']:.3f} greedy"
