"""A run from start to end: warm start, evaluation, training, evaluation, and all it leaves in its folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from turnwise import __version__
from turnwise.build import Parts, build, build_sft, check, exam_of, model_and_tokenizer, set_threads
from turnwise.config import Recipe
from turnwise.engines.slots import SlotEngine
from turnwise.evaluate import evaluate
from turnwise.learn.learner import save_policy
from turnwise.learn.policy import load_model
from turnwise.loop import Progress, Waiting, train
from turnwise.mixture import tasks_of
from turnwise.recipes import parse_recipe
from turnwise.runs import archive, tracker
from turnwise.runs.archive import Record
from turnwise.runs.atomic import atomic_folder, write_atomically
from turnwise.runs.checkpoint import Checkpoint, latest_checkpoint, prune_checkpoints, write_checkpoint
from turnwise.runs.curve import draw_curve
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import JsonLines, Several, TensorBoard, Tracker, WeightsAndBiases
from turnwise.schedule.stream import Used
from turnwise.schedule.take import RunStopped
from turnwise.screen import Screen

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> State:
        progress = {**data["progress"], "used": Used(**data["progress"]["used"])}
        return cls(**{**data, "progress": Progress(**progress)})


class Stopped(Exception):
    """A person asked the run to stop before there was anything to checkpoint."""


async def warm_model(recipe: Recipe, screen: Screen, seconds: dict[str, float], stop: asyncio.Event) -> tuple[Any, Any]:
    """The model that training starts from: as it is, or after the warm start, which is made once and cached."""
    if not recipe.sft.updates:
        return await model_and_tokenizer(recipe)
    folder = cache_folder() / f"warm-{fingerprint(recipe)}"
    if (folder / "config.json").is_file():
        screen.say(f"warm start: from {folder}")
        return await model_and_tokenizer(recipe, folder)
    began = time.perf_counter()
    model, tokenizer = await model_and_tokenizer(recipe)
    await imitate(recipe, model, tokenizer, screen, stop)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as aside:
        save_policy(model, tokenizer, aside)
    seconds["warm_start"] = time.perf_counter() - began
    return model, tokenizer


async def imitate(recipe: Recipe, model: Any, tokenizer: Any, screen: Screen, stop: asyncio.Event) -> None:
    """Train a model in place on demonstrations. Raises Stopped where `stop` is set before the end."""
    parts = build_sft(recipe, model, tokenizer)
    screen.begin("warm start", parts.settings.steps)

    async def after(progress: Progress, metrics: dict[str, float], records: list[Record], waiting: Waiting) -> None:
        screen.show(progress.step, {"loss": metrics["loss"]})

    progress = Progress()
    try:
        await train(parts.settings, parts.stages, parts.learner, parts.engine, parts.tasks, progress, after, stop)
    finally:
        screen.end()
    if progress.step < parts.settings.steps:
        raise Stopped


def cache_folder() -> Path:
    return Path(os.environ.get("TURNWISE_CACHE", "~/.cache/turnwise")).expanduser()


def fingerprint(recipe: Recipe) -> str:
    """Changes with everything a warm start depends on."""
    keep = {"seed", "model", "env", "rollout", "sft", "layout", "tokens_per_pass", "nonfinite_limit", "dropped_limit"}
    needed = recipe.model_dump(mode="json", include=keep, exclude={"env": {"__all__": {"batching"}}})
    text = json.dumps({**needed, "turnwise": __version__}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Run:
    """A training run in its folder."""

    def __init__(self, recipe: Recipe, folder: RunFolder, parts: Parts, state: State, screen: Screen) -> None:
        self.recipe = recipe
        self.folder = folder
        self.parts = parts
        self.state = state
        self.screen = screen
        self.heldout = tasks_of(recipe, "heldout", recipe.evaluation.final_tasks)
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

    async def exam(self, *, greedy: bool, tasks_per_dataset: int) -> dict[str, float]:
        """Held-out metrics of the live weights."""
        practice = exam_of(self.recipe, self.parts.engine, self.parts.renderer, self.parts.batches, greedy=greedy)
        tasks = [task for tasks in self.heldout.values() for task in tasks[:tasks_per_dataset]]
        with self.timed("evaluate"):
            result = await evaluate(practice, tasks, self.recipe.rollout.success_at)
        # A run that resumes here has not made this exam: training must not profit from prefixes it computed.
        await self.parts.engine.forget()
        name = "greedy" if greedy else "sampled"
        version = self.state.progress.step
        return {f"eval/{name}/{key}": value for key, value in result.metrics(version).items()}

    async def full_exam(self) -> dict[str, float]:
        count = self.recipe.evaluation.final_tasks
        return {
            **await self.exam(greedy=False, tasks_per_dataset=count),
            **await self.exam(greedy=True, tasks_per_dataset=count),
        }

    async def before(self) -> None:
        """Evaluate and checkpoint the model that training starts from."""
        metrics = await self.full_exam()
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
        step, every = progress.step, self.recipe.evaluation.every
        if step == self.recipe.steps:
            metrics |= await self.full_exam()
        elif every and step % every == 0:
            metrics |= await self.exam(greedy=False, tasks_per_dataset=self.recipe.evaluation.tasks)
        metrics |= self.batch_metrics()
        with self.timed("record"):
            self.tracker.log(step, metrics)
            archive.write_step(self.folder.archive, step, records)
            archive.prune(self.folder.archive, self.recipe.runs.archive_steps)
        lap_ended = time.perf_counter()
        self.spend("train", lap_ended - self.lap_began)
        self.lap_began = lap_ended
        success = metrics.get("eval/sampled/success", -1.0)
        if better := success > self.state.best_success:
            self.state.best_step, self.state.best_success = step, success
        if better or step % self.recipe.runs.checkpoint_every == 0 or step == self.recipe.steps:
            self.checkpoint()
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
            groups = [Record(self.waiting[number], False) for number in self.state.waiting]

            def write(path: Path) -> None:
                learner.save(path, tokenizer)
                archive.write_step(path / WAITING, step, groups)

            write_checkpoint(self.folder.checkpoints, step, self.state.to_json(), write)
            prune_checkpoints(self.folder.checkpoints, self.recipe.runs.checkpoints, self.state.best_step)
        self.last_checkpoint = step

    async def train(self, stop: asyncio.Event) -> None:
        parts, progress = self.parts, self.state.progress
        self.screen.begin("training", self.recipe.steps, progress.step)
        self.lap_began = time.perf_counter()
        try:
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
        except RunStopped:
            self.checkpoint()
            raise
        finally:
            self.screen.end()
            await parts.engine.close()
        self.checkpoint()

    def finish(self) -> dict[str, Any]:
        """Write summary and curve."""
        metrics = tracker.read_metrics(self.folder.metrics)
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


async def start(recipe: Recipe, screen: Screen, stop: asyncio.Event) -> dict[str, Any] | None:
    """A new run: its summary, or None where it was stopped."""
    check(recipe)
    folder = RunFolder.create(recipe.out, recipe.model_dump(mode="json"))
    return await go(await begun(recipe, folder, screen, stop), stop)


async def begun(recipe: Recipe, folder: RunFolder, screen: Screen, stop: asyncio.Event) -> Run:
    """A run at its beginning: warm start made, first evaluation and checkpoint written."""
    set_threads(recipe)
    state = State()
    model, tokenizer = await warm_model(recipe, screen, state.seconds, stop)
    if recipe.kl.coefficient and recipe.kl.reference == "start":
        with atomic_folder(folder.reference) as aside:
            save_policy(model, tokenizer, aside)
    run = Run(recipe, folder, build(recipe, model, tokenizer), state, screen)
    await run.before()
    return run


async def resume(path: Path, screen: Screen, stop: asyncio.Event) -> dict[str, Any] | None:
    """Go on with a run from its last checkpoint; what it recorded after that is cut away and made again."""
    folder = RunFolder.open(path)
    recipe = parse_recipe(json.loads(folder.config.read_text()), str(folder.config))
    recipe = recipe.model_copy(update={"out": str(path)})
    check(recipe)
    checkpoint = latest_checkpoint(folder.checkpoints)
    step = checkpoint.step if checkpoint else -1
    tracker.cut_back(folder.metrics, step)
    archive.cut_back(folder.archive, step)
    if checkpoint is None:
        return await go(await begun(recipe, folder, screen, stop), stop)
    return await go(await restored(recipe, folder, checkpoint, screen), stop)


async def restored(recipe: Recipe, folder: RunFolder, checkpoint: Checkpoint, screen: Screen) -> Run:
    """A run as its checkpoint left it."""
    set_threads(recipe)
    model, tokenizer = await model_and_tokenizer(recipe, checkpoint.path)
    parts = build(recipe, model, tokenizer, checkpoint.step, start=lambda: load_model(folder.reference))
    parts.learner.restore(checkpoint.path)
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
        run.tracker.close()
    if run.state.progress.step < run.recipe.steps:
        return None
    return run.finish()
