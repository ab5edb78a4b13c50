"""A run from start to end: warm start, evaluation, training, evaluation, and all it leaves in its folder."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.assemble.environments import tasks_of
from turnwise.assemble.run import Parts, build, check, model_and_tokenizer, set_threads
from turnwise.atomic import atomic_folder, write_atomically
from turnwise.cli.terminal import Screen
from turnwise.cluster.ranked import LearnerLost
from turnwise.engines.remote.router import Router
from turnwise.engines.slots.engine import SlotEngine
from turnwise.engines.vllm.engine import VllmEngine
from turnwise.evaluate.evaluator import Exam, Examiner, omen_of
from turnwise.learn.learner import save_policy
from turnwise.learn.policy import load_model
from turnwise.recipe.schema import Recipe
from turnwise.runs import archive, evaluations, setback, tracker
from turnwise.runs.archive import Record
from turnwise.runs.checkpoint import (
    Checkpoint,
    checkpoint_path,
    latest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    write_checkpoint,
    written_steps,
)
from turnwise.runs.checksums import write_checksums
from turnwise.runs.curve import draw_curve
from turnwise.runs.folder import RunFolder
from turnwise.runs.lock import owned
from turnwise.runs.tracker import JsonLines, Several, TensorBoard, Tracker, WeightsAndBiases
from turnwise.runs.trust import Trust, recipe_of_run, stamp_where_asked
from turnwise.schedule.stream import Used
from turnwise.schedule.take import RunStopped
from turnwise.schedule.workers import Workers, in_own_thread
from turnwise.train.loop import Progress, Waiting, train
from turnwise.train.warm_start import Stopped, warm_model
from turnwise.types import Task

WAITING = "waiting"
"""Folder of a checkpoint with the groups that were made and not trained on yet."""


@dataclass(slots=True)
class State:
    """What a checkpoint keeps beside weights and optimizer."""

    progress: Progress = field(default_factory=Progress)
    before: dict[str, float] = field(default_factory=dict)
    """Held-out success before training: sampled and greedy."""
    best_step: int | None = None
    best_success: float = -1.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds by stage, over all parts of the run."""
    waiting: list[int] = field(default_factory=list)
    """Draws whose groups were made and not trained on yet; the groups are beside it."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What metrics.jsonl was when this was written, see `tracker.seal`."""
    examined: int | None = None
    """Version whose exam has begun and whose result is not known yet; its checkpoint stays until it is."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> State:
        progress = {**data["progress"], "used": Used(**data["progress"]["used"])}
        return cls(**{**data, "progress": Progress(**progress)})


class Run:
    """A training run in its folder."""

    def __init__(self, recipe: Recipe, folder: RunFolder, parts: Parts, state: State, screen: Screen) -> None:
        self.recipe = recipe
        self.folder = folder
        self.parts = parts
        self.state = state
        self.screen = screen
        self.heldout = tasks_of(recipe, "heldout", max(recipe.evaluation.tasks, recipe.evaluation.final_tasks))
        self.examiner = Examiner(
            recipe, parts.exam_engine, parts.renderer, parts.batches, folder.evaluations, parts.plays
        )
        self.tracker = open_tracker(recipe, folder)
        self.since = self.counters()
        self.last_checkpoint = -1
        self.waiting: Waiting = {}
        self.lap_began = time.perf_counter()

    def counters(self) -> dict[str, float]:
        """Seconds inside the models so far."""
        engine = self.parts.engine
        generate = engine.model.model_seconds if isinstance(engine, SlotEngine) else 0.0
        return {"generate": generate, **self.parts.learner.seconds}

    def batch_metrics(self) -> dict[str, float]:
        """How calls of environments were put together since the last time."""
        batches = self.parts.batches.items()
        return {f"batch/{label}/{key}": value for label, own in batches for key, value in own.report().items()}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self.spend(stage, time.perf_counter() - before)

    def spend(self, stage: str, seconds: float) -> None:
        self.state.seconds[stage] = self.state.seconds.get(stage, 0.0) + seconds

    async def full_exam(self) -> dict[str, float]:
        """Held-out metrics of the live weights before and after training."""
        return {
            **(await self.exam(greedy=False, count=self.recipe.evaluation.final_tasks)).metrics,
            **(await self.exam(greedy=True, count=self.recipe.evaluation.final_tasks)).metrics,
        }

    async def exam(self, *, greedy: bool, count: int) -> Exam:
        """An exam of the live weights, for which training waits."""
        version = self.state.progress.step
        tasks = self.tasks(count)
        seen = omen_of(self.recipe, tasks, greedy=greedy)
        return await self.examiner.exam(version, tasks, greedy=greedy, weights=self.weights(version), seen=seen)

    async def begin_exam(self, version: int) -> None:
        """Begin an exam beside training."""
        weights = self.weights(version)
        if weights is None:
            raise ValueError(f"the evaluation of step {version} has not ended; resume with evaluation.overlap = true")
        tasks = self.tasks(self.recipe.evaluation.tasks)
        await self.examiner.begin(version, tasks, weights, omen_of(self.recipe, tasks, greedy=False))

    def tasks(self, count: int) -> list[Task]:
        """So many held-out tasks of each dataset."""
        return [task for tasks in self.heldout.values() for task in tasks[:count]]

    def weights(self, version: int) -> Mapping[str, Any] | None:
        """What exams have to load for a version: nothing where they share the engine of training, which has it."""
        if self.parts.exam_engine is self.parts.engine:
            return None
        if version == self.state.progress.step:
            return self.parts.learner.publish()
        path = checkpoint_path(self.folder.checkpoints, version)
        if not path.is_dir():
            raise ValueError(f"{path} is not there, and its evaluation has not ended; put it back from a copy")
        weights: Mapping[str, Any] = load_model(read_checkpoint(path).path).state_dict()
        return weights

    async def examine(self) -> dict[str, float]:
        """Make the exam that is due, unless it goes on beside training; metrics of those that have ended. One that is
        beside training is waited for where the next is due."""
        step, due, metrics = self.state.progress.step, self.is_due, {}
        if (ended := await self.examiner.collect(wait=due)) is not None:
            self.state.examined, metrics = None, ended.metrics
            self.compare(metrics)
        if step == self.recipe.steps:
            if metrics:  # on a line of its own: those of the last exam have the same names
                self.tracker.log(step, metrics)
            metrics = await self.full_exam()
        elif due and not self.recipe.evaluation.overlap:
            metrics = (await self.exam(greedy=False, count=self.recipe.evaluation.tasks)).metrics
        self.compare(metrics)
        return metrics

    @property
    def is_due(self) -> bool:
        """Whether the weights of this step are to be examined."""
        step, every = self.state.progress.step, self.recipe.evaluation.every
        return step == self.recipe.steps or bool(every and step % every == 0)

    def compare(self, metrics: Mapping[str, float]) -> None:
        """Remember the version of an exam where it is the best so far."""
        success = metrics.get("eval/sampled/success", -1.0)
        if success > self.state.best_success:
            self.state.best_step, self.state.best_success = int(metrics["eval/sampled/version"]), success

    async def before(self) -> None:
        """Evaluate and checkpoint the model that training starts from."""
        with self.timed("evaluate"):
            metrics = await self.full_exam()
        self.parts.failures.sum_up("the first evaluation")
        self.state.before = success_of(metrics)
        self.tracker.log(0, metrics | self.batch_metrics())
        self.checkpoint()
        self.since = self.counters()
        self.screen.say(f"before: held-out success {describe_success(self.state.before)}")

    async def after(
        self, progress: Progress, metrics: dict[str, float], records: list[Record], waiting: Waiting
    ) -> None:
        """Evaluate where due, log, archive, checkpoint where due."""
        self.waiting = waiting
        now = self.counters()
        metrics |= {f"seconds/{name}": now[name] - self.since[name] for name in now}
        metrics["speed/tokens_per_second"] = metrics["tokens/planned"] / metrics["seconds/step"]
        for stage in ("step", "plan_and_credit", "load"):
            self.spend(stage, metrics[f"seconds/{stage}"])
        step, last = progress.step, progress.step == self.recipe.steps
        with self.timed("evaluate"):
            metrics |= await self.examine()
        metrics |= self.batch_metrics()
        self.parts.failures.sum_up(f"step {step}")
        with self.timed("record"):
            self.tracker.log(step, metrics)
            archive.write_step(self.folder.archive, step, records)
            archive.prune(self.folder.archive, self.recipe.runs.archive_steps)
            evaluations.prune(self.folder.evaluations, self.recipe.runs.evaluations, self.state.best_step)
        lap_ended = time.perf_counter()
        self.spend("train", lap_ended - self.lap_began)
        self.lap_began = lap_ended
        if begins := self.recipe.evaluation.overlap and self.is_due and not last:
            self.state.examined = step
        if begins or last or self.state.best_step == step or step % self.recipe.runs.checkpoint_every == 0:
            self.checkpoint()
        if begins:  # after its checkpoint, from which a resume begins it again
            await self.begin_exam(step)
        self.since = self.counters()
        self.screen.show(step, metrics)

    def checkpoint(self) -> None:
        """Write the present state, once per step."""
        step = self.state.progress.step
        if step == self.last_checkpoint:
            return
        with self.timed("record"):
            learner, tokenizer = self.parts.learner, self.parts.tokenizer
            self.state.waiting = sorted(self.waiting)
            self.state.metrics = tracker.seal(self.folder.metrics)
            groups = [Record(self.waiting[number], False) for number in self.state.waiting]

            def write(path: Path) -> None:
                learner.save(path, tokenizer)
                archive.write_step(path / WAITING, step, groups)

            write_checkpoint(self.folder.checkpoints, step, self.state.to_json(), write)
            stay = self.state.best_step, self.state.examined
            prune_checkpoints(self.folder.checkpoints, self.recipe.runs.checkpoints, *stay)
        self.last_checkpoint = step

    async def train(self, stop: asyncio.Event) -> None:
        parts, progress = self.parts, self.state.progress
        self.screen.begin("training", self.recipe.steps, progress.step)
        self.lap_began = time.perf_counter()
        try:
            if self.state.examined is not None:
                await self.begin_exam(self.state.examined)
            await train(
                parts.settings,
                parts.stages,
                parts.learner,
                parts.engine,
                parts.tasks,
                progress,
                self.after,
                stop,
                self.waiting,
            )
        except LearnerLost:
            raise
        except RunStopped:
            self.checkpoint()
            raise
        finally:
            self.screen.end()
            await self.examiner.close()
            await parts.engine.close()
        self.checkpoint()

    def close(self) -> None:
        self.tracker.close()
        self.parts.close()

    def finish(self) -> dict[str, Any]:
        """Write summary and curve."""
        metrics = tracker.read_metrics(self.folder.metrics)
        if not metrics or metrics[-1]["step"] != self.recipe.steps:
            raise ValueError(f"{self.folder.metrics} does not have the last step; restore it from a copy")
        stages = {**self.state.seconds, **dict.fromkeys(self.counters(), 0.0)}
        for line in metrics:
            for name in self.counters():
                stages[name] += line.get(f"seconds/{name}", 0.0)
        summary = {
            "before": self.state.before,
            "after": success_of(metrics[-1]),
            "seconds": {name: round(value, 3) for name, value in stages.items()},
            "updates": self.state.progress.updates,
            "lag_max": self.state.progress.lag_max,
        }
        write_atomically(self.folder.summary, json.dumps(summary, indent=2) + "\n")
        draw_curve(metrics, self.folder.curve, f"{', '.join(e.label for e in self.recipe.env)}: success")
        return summary


def keeps_start(recipe: Recipe) -> bool:
    """Whether the folder of a run has the model that training started from."""
    return bool(recipe.lora.rank or (recipe.kl.coefficient and recipe.kl.reference == "start"))


def success_of(metrics: Mapping[str, float]) -> dict[str, float]:
    return {kind: metrics[f"eval/{kind}/success"] for kind in ("sampled", "greedy")}


def describe_success(success: Mapping[str, float]) -> str:
    return f"{success['sampled']:.3f} sampled, {success['greedy']:.3f} greedy"


def open_tracker(recipe: Recipe, folder: RunFolder) -> Tracker:
    trackers: list[Tracker] = [JsonLines(folder.metrics)]
    if "tensorboard" in recipe.runs.trackers:
        trackers.append(TensorBoard(folder.path / "tensorboard"))
    if "wandb" in recipe.runs.trackers:
        trackers.append(WeightsAndBiases(recipe.runs.project, folder.path.name, folder.path))
    return Several(trackers)


async def start(
    recipe: Recipe, screen: Screen, stop: asyncio.Event, workers: Workers = in_own_thread
) -> dict[str, Any] | None:
    """A new run: its summary, or None where it was stopped."""
    check(recipe)
    with owned(RunFolder.make(recipe.out).path):
        folder = RunFolder.create(recipe.out, recipe.model_dump(mode="json"), partial(stamp_where_asked, recipe))
        try:
            run = await begun(recipe, folder, screen, stop, workers)
        except (Stopped, asyncio.CancelledError, KeyboardInterrupt):  # and can be resumed
            raise
        except BaseException:
            if not written_steps(folder.checkpoints):
                folder.clear()
            raise
        return await go(run, stop)


async def begun(recipe: Recipe, folder: RunFolder, screen: Screen, stop: asyncio.Event, workers: Workers) -> Run:
    """A run at its beginning: warm start made, first evaluation and checkpoint written."""
    set_threads(recipe)
    state = State()
    model, tokenizer = await warm_model(recipe, screen, state.seconds, stop)
    if keeps_start(recipe):
        with atomic_folder(folder.reference) as aside:
            save_policy(model, tokenizer, aside)
            write_checksums(aside)
    parts = build(recipe, model, tokenizer, workers=workers)
    await open_engines(parts)
    await check_weights(parts, 0)
    run = Run(recipe, folder, parts, state, screen)
    try:
        await run.before()
    except BaseException:
        await run.examiner.close()
        await parts.engine.close()
        run.close()
        raise
    return run


async def open_engines(parts: Parts) -> None:
    """Start engines that take long to, before there is a call whose deadline would count that."""
    for engine in (parts.engine, parts.exam_engine):
        if isinstance(engine, (VllmEngine, Router)):
            await engine.open()


async def check_weights(parts: Parts, version: int) -> None:
    """Stop before anything is trained where the engine does not compute what the learner does."""
    if parts.check is not None and (found := await parts.check.begin(version)).problem:
        await parts.engine.close()
        parts.close()
        raise RunStopped(found.problem)


async def resume(
    path: Path,
    screen: Screen,
    stop: asyncio.Event,
    workers: Workers = in_own_thread,
    overrides: Sequence[str] = (),
    trust: Trust = "ask",
) -> dict[str, Any] | None:
    """Go on with a run from its last checkpoint; what it recorded after that is cut away and made again. Overrides may
    say that it runs elsewhere now."""
    folder = RunFolder.open(path)
    with owned(folder.path):
        recipe = recipe_of_run(folder, overrides, trust).model_copy(update={"out": str(folder.path)})
        return await go(await reopened(recipe, folder, screen, stop, workers), stop)


async def reopened(recipe: Recipe, folder: RunFolder, screen: Screen, stop: asyncio.Event, workers: Workers) -> Run:
    """A run as its last checkpoint left it, or at its beginning where it has never come to one."""
    check(recipe)
    checkpoint = latest_checkpoint(folder.checkpoints)
    if checkpoint is not None:
        folder.check_reference(keeps_start(recipe))
    setback.cut_back(folder, checkpoint, recipe.runs.checkpoint_every)
    if checkpoint is None:
        return await begun(recipe, folder, screen, stop, workers)
    return await restored(recipe, folder, checkpoint, screen, workers)


async def restored(
    recipe: Recipe, folder: RunFolder, checkpoint: Checkpoint, screen: Screen, workers: Workers = in_own_thread
) -> Run:
    """A run as its checkpoint left it."""
    set_threads(recipe)
    model, tokenizer = await model_and_tokenizer(recipe, folder.reference if recipe.lora.rank else checkpoint.path)
    start = partial(load_model, folder.reference)
    parts = build(recipe, model, tokenizer, checkpoint.step, start, workers)
    await open_engines(parts)
    parts.learner.restore(checkpoint.path)
    if recipe.lora.rank:  # the engine was made with the model as it is without them
        await parts.engine.load(parts.learner.publish(), checkpoint.step)
    await check_weights(parts, checkpoint.step)
    run = Run(recipe, folder, parts, State.from_json(checkpoint.state), screen)
    run.last_checkpoint = checkpoint.step
    [found] = archive.archived_steps(checkpoint.path / WAITING)
    records = archive.read_step(checkpoint.path / WAITING / f"step-{found:06d}.parquet")
    run.waiting = {number: record.group for number, record in zip(run.state.waiting, records, strict=True)}
    screen.say(f"resuming {folder.path} after step {checkpoint.step}")
    return run


async def go(run: Run, stop: asyncio.Event) -> dict[str, Any] | None:
    """Train to the end. A stop or a run that cannot go on leaves a checkpoint behind."""
    try:
        await run.train(stop)
    except RunStopped as error:
        raise RunStopped(f"{error} (a checkpoint is in {run.folder.checkpoints})") from None
    finally:
        run.close()
    if run.state.progress.step < run.recipe.steps:
        return None
    return run.finish()
