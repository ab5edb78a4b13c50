"""The training loop: groups, plans, scores, credit, updates, new weights. There is one; synchronous is max_lag = 0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.credit.estimators import Credit
from turnwise.credit.weighting import Weights
from turnwise.engines.base import Engine
from turnwise.learn.learner import Learner
from turnwise.learn.losses import Loss
from turnwise.plan.plan import Plan
from turnwise.runs.archive import Record
from turnwise.runs.describe import describe
from turnwise.schedule.stream import Practise, Slots, stream_groups
from turnwise.schedule.take import RunStopped, Taken, take
from turnwise.schedule.tasks import TaskOrder
from turnwise.types import Group, Turn, turns_of


@dataclass(frozen=True, slots=True)
class Settings:
    """The numbers of the loop."""

    steps: int
    max_lag: int
    groups_per_step: int
    groups_per_update: int
    epochs: int
    anchor: str
    """What the loss compares new logprobs with: "engine" (as sampled) or "learner" (scored before the first update)."""
    success_at: float
    nonfinite_limit: int
    dropped_limit: int

    @property
    def updates_per_step(self) -> int:
        return self.groups_per_step // self.groups_per_update * self.epochs


@dataclass(slots=True)
class Progress:
    """Where a run is: all that a checkpoint must know beside weights and optimizer."""

    step: int = 0
    """Steps done; also the version of the live weights."""
    draws: int = 0
    """Tasks used: trained on or dropped."""
    updates: int = 0
    lag_max: int = 0


@dataclass(frozen=True, slots=True)
class Stages:
    """The parts of a step, chosen in build.py."""

    practise: Practise
    keep: Callable[[Group], bool]
    plan: Callable[[Sequence[Turn]], list[Plan]]
    estimate: Callable[[Sequence[Group], Mapping[str, Any]], Credit]
    weigh: Callable[[Sequence[Group]], Weights]
    loss: Loss
    run: Callable[..., Awaitable[Any]]
    """Calls the learner: inline at lag 0, in a thread where sampling goes on meanwhile."""


After = Callable[[Progress, dict[str, float], list[Record]], Awaitable[None]]
"""What happens after a step's weights are live and before its slots are free: log, archive, evaluate, checkpoint."""


async def train(
    settings: Settings,
    stages: Stages,
    learner: Learner,
    engine: Engine,
    tasks: TaskOrder,
    progress: Progress,
    after: After,
    stop: asyncio.Event,
) -> None:
    """Train until the last step, or until `stop` is set; `progress` is then at the end of a whole step."""
    slots = Slots((settings.max_lag + 1) * settings.groups_per_step)
    wanted = (settings.steps - progress.step) * settings.groups_per_step
    tasks.skip(progress.draws)
    async with stream_groups(tasks.draw, stages.practise, slots, wanted) as stream:
        while progress.step < settings.steps:
            began = time.perf_counter()
            next_groups = take(stream, settings.groups_per_step, stages.keep, settings.dropped_limit)
            taken = await unless_stopped(next_groups, stop)
            if taken is None:
                return
            waited = time.perf_counter() - began
            metrics, records = await stages.run(train_step, settings, stages, learner, taken, progress.step)
            progress.step += 1
            loading = time.perf_counter()
            await engine.load(learner.publish(), progress.step)
            now = time.perf_counter()
            progress.draws += taken.count
            progress.updates += settings.updates_per_step
            progress.lag_max = max(progress.lag_max, int(metrics["lag/max"]))
            timings = {"seconds/wait_for_groups": waited, "seconds/load": now - loading, "seconds/step": now - began}
            await after(progress, {**metrics, **timings}, records)
            if learner.num_skipped_in_a_row >= settings.nonfinite_limit:
                raise RunStopped(
                    f"{learner.num_skipped_in_a_row} updates in a row had a non-finite loss or gradient; "
                    "lower optimizer.learning_rate and resume from an earlier checkpoint"
                )
            slots.release(len(taken.kept))
            if stop.is_set():
                return


async def unless_stopped(work: Awaitable[Taken], stop: asyncio.Event) -> Taken | None:
    """The result of `work`, or None where `stop` is set first."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        return None if stop.is_set() else working.result()
    finally:
        working.cancel()
        stopping.cancel()


def train_step(
    settings: Settings, stages: Stages, learner: Learner, taken: Taken, version: int
) -> tuple[dict[str, float], list[Record]]:
    """All updates of one step on the groups taken: metrics, and what the archive shall hold."""
    began = time.perf_counter()
    spent = sum(learner.seconds.values())
    size = settings.groups_per_update
    batches = [taken.kept[start : start + size] for start in range(0, len(taken.kept), size)]
    turns = [list(turns_of(batch)) for batch in batches]
    plans = [stages.plan(batch) for batch in turns]
    old = anchors(settings, learner, plans, turns)
    try:
        credit = stages.estimate(taken.kept, {"old": flat(old)} if old[0] is not None else {})
    except ValueError as error:  # totals that the estimator is not made for; nothing has been updated yet
        raise RunStopped(str(error)) from error
    credits = split_by(credit, [len(batch) for batch in turns])
    weights = [stages.weigh(batch) for batch in batches]
    logged: list[dict[str, float]] = []
    sampled_gap: dict[str, float] = {}
    for _ in range(settings.epochs):
        for index, plan in enumerate(plans):
            metrics, now = learner.update(plan, credits[index], weights[index], old[index], stages.loss)
            logged.append(metrics)
            if len(logged) == 1:
                sampled_gap = gap(turns[index], now, version)
    metrics = {
        **describe(taken.kept, taken.dropped, version=version, success_at=settings.success_at),
        **sampled_gap,
        **{name: float(np.mean([update[name] for update in logged])) for name in logged[0]},
        "tokens/planned": float(sum(plan.num_tokens for batch in plans for plan in batch)),
        "tokens/action": float(sum(len(plan.action_nodes) for batch in plans for plan in batch)),
        "passes": float(sum(len(batch) for batch in plans)),
        "seconds/plan_and_credit": time.perf_counter() - began - (sum(learner.seconds.values()) - spent),
        "seconds/train": time.perf_counter() - began,
    }
    return metrics, records_of(taken, credit, flat(weights))


def anchors(
    settings: Settings, learner: Learner, plans: Sequence[Sequence[Plan]], turns: Sequence[Sequence[Turn]]
) -> list[list[np.ndarray] | None]:
    """The old logprobs of every mini-batch, before the first update.

    The only update of a step compares the policy with itself, so nothing is scored for it.
    """
    if settings.anchor == "engine":
        return [[turn.logprobs for turn in batch] for batch in turns]
    if settings.updates_per_step == 1:
        return [None]
    return [list(learner.score(plan, len(batch))) for plan, batch in zip(plans, turns, strict=True)]


def gap(turns: Sequence[Turn], logprobs: Sequence[np.ndarray], version: int) -> dict[str, float]:
    """How far the engine's logprobs are from the learner's, on turns that the weights being trained have sampled."""
    fresh = [
        (turn.logprobs, now)
        for turn, now in zip(turns, logprobs, strict=True)
        if len(turn.action) and (turn.versions == version).all() and not np.isnan(turn.logprobs).any()
    ]
    if not fresh:
        return {}
    difference = np.concatenate([now - sampled for sampled, now in fresh]).astype(np.float64)
    return {
        "gap/mean": float(np.abs(difference).mean()),
        "gap/max": float(np.abs(difference).max()),
        "gap/k3": float((np.expm1(difference) - difference).mean()),
    }


def records_of(taken: Taken, credit: Credit, weights: Weights) -> list[Record]:
    """Every group of the step for the archive; credit and weights with those that were trained on."""
    sizes = [sum(len(trajectory.turns) for trajectory in group.trajectories) for group in taken.kept]
    kept = [
        Record(group, True, tuple(c.astype(np.float32) for c in cs), tuple(w.astype(np.float32) for w in ws))
        for group, cs, ws in zip(taken.kept, split_by(credit, sizes), split_by(weights, sizes), strict=True)
    ]
    return [*kept, *(Record(group, False, (), ()) for group in taken.dropped)]


def split_by(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Consecutive stretches of the given sizes."""
    ends = np.cumsum(sizes).tolist()
    return [list(items[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def flat(batches: Sequence[Sequence[Any] | None]) -> list[Any]:
    return [item for batch in batches if batch is not None for item in batch]
