"""The training loop: groups, plans, scores, credit, updates, new weights. There is one; synchronous is max_lag = 0.

async for kept, dropped in take(stream, groups_per_step, keep):       # attempts go on meanwhile, up to max_lag
    batches = split(kept, groups_per_update)                          # by group, never by row
    plans   = [plan(turns) for turns in batches]                      # unique tokens, layout only
    scores  = learner.score(plans, needs)                             # old, reference, teacher logprobs, values
    credit  = estimate(kept, scores)                                  # one advantage per action token
    for epoch in epochs: for batch in batches:
        learner.update(plans, credit, token_weights, scores)          # one optimizer step
    engine.load(learner.publish(), version + 1)                       # sampling goes on
    after(...)                                                        # log, archive, evaluate, checkpoint
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.credit.correction import Correct
from turnwise.credit.returns import Credit
from turnwise.credit.scope import Anchor, PerTurn
from turnwise.credit.weighting import TokenWeights
from turnwise.engines.base import Engine, can_sleep
from turnwise.learn.base import AnyLearner
from turnwise.learn.objective import Objective
from turnwise.plan.plan import Plan
from turnwise.plan.routes import route_shares, routed_by
from turnwise.runs.archive import Record
from turnwise.runs.describe import describe, failure_share
from turnwise.schedule.order import Order
from turnwise.schedule.resting import Heard
from turnwise.schedule.stopping import RunStopped
from turnwise.schedule.stream import GroupStream, LagSlots, MakeGroup, Used
from turnwise.schedule.take import Taken, take
from turnwise.schedule.tasks import Draws
from turnwise.training.weight_check import NOT_CHECKED, CheckResult
from turnwise.types import Group, Turn, turns_of
from turnwise.weights.stages import listening, stage

log = logging.getLogger(__name__)

IN_LOSS = frozenset({"reference", "buckets"})
"""Scores that the loss compares the policy with, beside its anchor."""


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
    needs: frozenset[str]
    """What is scored before the first update of a step: old, inspection, reference, teacher, buckets, values."""
    success_at: float
    max_nonfinite_updates: int
    max_dropped_groups: int
    order: Order
    """Whether groups are taken in the order they started, which bounds lag, as they finish, or as they finish while
    none is late, which bounds lag too."""
    slots: int
    """Groups that may have started and not been trained on: at most (max_lag + 1) * groups_per_step."""
    stale: str
    """What is done with tokens that are older than max_lag, where groups are taken as they finish: "drop_group" or
    "mask_turn"."""
    patience: float
    """Seconds without a new group after which a warning says what is waited for."""
    max_logprob_gap: float
    """Largest mean difference between the engine's logprobs and the learner's before the run stops."""

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
    used: Used = field(default_factory=Used)
    """Which draws these were."""
    heard: list[Heard] = field(default_factory=list)
    """What the order of tasks depends on beside the seed, where tasks rest."""
    updates: int = 0
    lag_max: int = 0


Arrived = Callable[[int], Awaitable[CheckResult]]
"""Whether the engine computes what the learner does, after the load of a version."""


async def unchecked(version: int) -> CheckResult:
    return NOT_CHECKED


@dataclass(frozen=True, slots=True)
class Stages:
    """The functions of a step, as a recipe names them."""

    make_group: MakeGroup
    keep: Callable[[Group], bool]
    plan: Callable[[Sequence[Turn]], list[Plan]]
    estimate: Callable[[Sequence[Group], Mapping[str, Any]], Credit]
    correct: Correct
    targets: Callable[[Sequence[Group], Mapping[str, Any]], Credit] | None
    """What a critic shall learn; None where there is none."""
    weigh: Callable[[Sequence[Group]], TokenWeights]
    anchor: Anchor
    objective: Objective
    run: Callable[..., Awaitable[Any]]
    """Calls the learner: inline at lag 0, in a thread where sampling goes on meanwhile."""
    arrived: Arrived = unchecked


Waiting = Mapping[int, Group]
"""By the number of their draw: groups that were made and not trained on yet."""
After = Callable[[Progress, dict[str, float], list[Record], Waiting], Awaitable[None]]
"""What happens after a step's weights are live and before its slots are free: log, archive, evaluate, checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """What the loop works with: who samples, who learns, what they do."""

    settings: Settings
    stages: Stages
    learner: AnyLearner
    engine: Engine
    tasks: Draws


async def train(
    parts: LoopParts,
    progress: Progress,
    after: After,
    stop: asyncio.Event,
    waiting: Waiting = MappingProxyType({}),
) -> None:
    """Train until the last step, or until `stop` is set; `progress` is then at the end of a whole step. Groups that an
    earlier part of the run left `waiting` are trained on in their turn."""
    settings, stages, learner, engine, tasks = parts.settings, parts.stages, parts.learner, parts.engine, parts.tasks
    slots = LagSlots(settings.slots)
    wanted = (settings.steps - progress.step) * settings.groups_per_step
    tasks.skip(progress.used.base, progress.heard)
    async with GroupStream(
        tasks.draw,
        stages.make_group,
        slots,
        wanted,
        order=settings.order,
        groups_per_step=settings.groups_per_step,
        max_lag=settings.max_lag,
        version=progress.step,
        used=progress.used,
        finished=waiting,
        patience=settings.patience,
    ) as stream:
        while progress.step < settings.steps:
            began = time.perf_counter()
            keep = partial(is_kept, settings, stages, progress.step)
            next_groups = take(stream, settings.groups_per_step, keep, settings.max_dropped_groups)
            taken = await unless_stopped(next_groups, stop)
            if taken is None:
                return
            waited = time.perf_counter() - began
            warn_of_failures([*taken.kept, *taken.dropped])
            if can_sleep(engine):  # at lag 0: nothing is sampled until the load below
                await engine.sleep()
            metrics, records = await stages.run(train_step, settings, stages, learner, taken, progress.step)
            progress.step += 1
            loading = time.perf_counter()
            found, load_metrics = await load(parts, stream, progress.step)
            now = time.perf_counter()
            progress.draws += taken.count
            progress.used = stream.used.copy()
            progress.heard = list(tasks.hear([*taken.kept, *taken.dropped]))
            stream.fairness.trained(taken.kept)
            progress.updates += settings.updates_per_step
            progress.lag_max = max(progress.lag_max, int(np.nan_to_num(metrics["lag/max"])))
            timings = {"seconds/wait_for_groups": waited, "seconds/load": now - loading, "seconds/step": now - began}
            used = tasks.metrics(progress.draws)
            measured = {**metrics, **found.metrics, **timings, **load_metrics, **used, **stream.fairness.metrics()}
            await after(progress, measured, records, stream.waiting())
            refuse_to_go_on(settings, learner, metrics, found)
            slots.release(len(taken.kept))
            if stop.is_set():
                return


async def load(parts: LoopParts, stream: GroupStream, version: int) -> tuple[CheckResult, dict[str, float]]:
    """Have the engine sample with the learner's weights: (what a check of the load found, seconds of its stages)."""
    with listening() as stages_of_load:
        if can_sleep(parts.engine):
            await parts.stages.run(parts.learner.release)
        with stage("gather"):
            weights = await parts.stages.run(parts.learner.publish)
        await parts.engine.load(weights, version)
        stream.advance(version)
        with stage("check"):
            found = await parts.stages.arrived(version)
    return found, stages_of_load.metrics


def refuse_to_go_on(settings: Settings, learner: AnyLearner, metrics: Mapping[str, float], found: CheckResult) -> None:
    """Raise RunStopped where more steps would train nothing, or something else than is sampled."""
    if learner.num_skipped_in_a_row >= settings.max_nonfinite_updates:
        raise RunStopped(
            f"{learner.num_skipped_in_a_row} updates in a row had a non-finite loss or gradient; "
            "lower optimizer.learning_rate and resume from an earlier checkpoint"
        )
    if metrics.get("gap/mean", 0.0) > settings.max_logprob_gap:
        raise RunStopped(
            f"the engine's logprobs differ from the learner's by {metrics['gap/mean']:.1e} on average, more "
            f"than guards.max_logprob_gap = {settings.max_logprob_gap:g}: its weights are not those that are trained"
        )
    if found.problem:
        raise RunStopped(found.problem)


def is_kept(settings: Settings, stages: Stages, version: int, group: Group) -> bool:
    """Whether a group is trained on: worth it, and with no token that is too old, where such groups are dropped."""
    if settings.stale == "drop_group" and is_stale(list(turns_of([group])), version, settings).any():
        return False
    return stages.keep(group)


def is_stale(turns: Sequence[Turn], version: int, settings: Settings) -> NDArray[np.bool_]:
    """Which turns have a token that more than max_lag versions of weights came after. Only among groups that are taken
    as they finish can one be that old, and demonstrations have no age."""
    if settings.order != "finished":
        return np.zeros(len(turns), bool)
    oldest = [int(turn.versions.min(initial=version)) for turn in turns]
    return version - np.array(oldest, np.int64) > settings.max_lag


def warn_of_failures(groups: Sequence[Group]) -> None:
    """Name the tasks at which half of the attempts or more failed: a policy may be learning to break them."""
    broken = {group.task.id: share for group in groups if (share := failure_share(group)) >= 0.5}
    if broken:
        worst = sorted(broken, key=lambda task: -broken[task])[:3]
        shares = ", ".join(f"{task} ({broken[task]:.0%})" for task in worst)
        log.warning("attempts fail at %d of %d tasks of this step, most at %s", len(broken), len(groups), shares)


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
    settings: Settings, stages: Stages, learner: AnyLearner, taken: Taken, version: int
) -> tuple[dict[str, float], list[Record]]:
    """All updates of one step on the groups taken: metrics, and what the archive shall hold."""
    began = time.perf_counter()
    spent = sum(learner.seconds.values())
    size = settings.groups_per_update
    batches = [taken.kept[start : start + size] for start in range(0, len(taken.kept), size)]
    turns = [list(turns_of(batch)) for batch in batches]
    plans = [stages.plan(batch) for batch in turns]
    scores = {
        name: [learner.score(plan, len(batch), name) for plan, batch in zip(plans, turns, strict=True)]
        for name in sorted(settings.needs)
    }
    step_scores = {name: flat(scores[name]) for name in scores}
    try:
        credit = stages.estimate(taken.kept, step_scores)
        corrected, measured = stages.correct(taken.kept, credit, flat(scores.get("old", [])))
        targets = stages.targets(taken.kept, step_scores) if stages.targets else None
    except ValueError as error:  # values that an estimator is not made for; nothing has been updated yet
        raise RunStopped(str(error)) from error
    sizes = [len(batch) for batch in turns]
    credits = split_by(corrected, sizes)
    critic_targets = split_by(targets, sizes) if targets is not None else []
    stale = [is_stale(batch, version, settings) for batch in turns]
    token_weights = [
        [weight * (not old) for weight, old in zip(stages.weigh(batch), of_batch, strict=True)]
        for batch, of_batch in zip(batches, stale, strict=True)
    ]
    logged: list[dict[str, float]] = []
    sampled_gap: dict[str, float] = {}
    for _ in range(settings.epochs):
        for index, (plan, weights) in enumerate(zip(plans, token_weights, strict=True)):
            loss_inputs: dict[str, PerTurn] = {name: scores[name][index] for name in scores if name in IN_LOSS}
            if (old := old_of(settings, scores, turns, index)) is not None:
                changed = bool(logged) or settings.anchor == "engine"
                score_now = partial(learner.score, plan, len(turns[index])) if changed else partial(unchanged, old)
                loss_inputs["old"] = stages.anchor(batches[index], old, score_now)
            metrics, logprobs = learner.update(plan, credits[index], weights, loss_inputs, stages.objective)
            if critic_targets:
                metrics |= learner.update_critic(plan, critic_targets[index], weights, scores["values"][index])
            if not sampled_gap and all(update["idle"] or update["skipped"] for update in logged):
                sampled_gap = gap(turns[index], logprobs, version)
            logged.append(metrics)
    metrics = {
        **describe(taken.kept, taken.dropped, version=version, success_at=settings.success_at),
        **sampled_gap,
        **measured,
        **route_shares(plan.routes for batch in plans for plan in batch),
        "lag/masked_turns": float(sum(of_batch.sum() for of_batch in stale)),
        **mean_of_updates(logged),
        "tokens/planned": float(sum(plan.num_tokens for batch in plans for plan in batch)),
        "tokens/sampled": float(sum(len(turn.action) for batch in turns for turn in batch)),
        "tokens/action": float(sum(len(plan.action_nodes) for batch in plans for plan in batch)),
        "passes": float(sum(plan.num_stretches for batch in plans for plan in batch)),
        "seconds/plan_and_credit": time.perf_counter() - began - (sum(learner.seconds.values()) - spent),
        "seconds/train": time.perf_counter() - began,
    }
    return metrics, records_of(taken, credit, flat(token_weights), step_scores.get("inspection", []))


def mean_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it: one whose tokens have no weight measures nothing."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: float(np.mean([update[name] for update in updates if name in update])) for name in names}


def old_of(
    settings: Settings, scores: Mapping[str, Sequence[PerTurn]], turns: Sequence[Sequence[Turn]], index: int
) -> PerTurn | None:
    """The logprobs that a mini-batch's loss is anchored on; None where the policy is its own, in a step's only
    update."""
    if settings.anchor == "engine":
        return [turn.logprobs for turn in turns[index]]
    return scores["old"][index] if "old" in scores else None


def unchanged(old: PerTurn) -> PerTurn:
    return old


def gap(turns: Sequence[Turn], logprobs: Sequence[np.ndarray], version: int) -> dict[str, float]:
    """How far the engine's logprobs are from the learner's, on turns that the weights being trained have sampled, and
    with their routes, if routes are replayed. Those with routes of other weights on their paths are measured apart: the
    engine took its own there."""
    is_new = [bool((turn.versions == version).all()) for turn in turns]
    differences: dict[bool, list[NDArray[np.float64]]] = {True: [], False: []}
    for turn, rescored, new, routed in zip(turns, logprobs, is_new, routed_by(turns, is_new), strict=True):
        if len(turn.action) and new and not np.isnan(turn.logprobs).any():
            differences[routed].append((rescored - turn.logprobs).astype(np.float64))
    found: dict[str, float] = {}
    if differences[True]:
        difference = np.concatenate(differences[True])
        found |= {
            "gap/mean": float(np.abs(difference).mean()),
            "gap/max": float(np.abs(difference).max()),
            "gap/k3": float((np.expm1(difference) - difference).mean()),
        }
    if any(turn.routes is not None for turn in turns):
        apart = np.abs(np.concatenate([np.zeros(0), *differences[False]]))
        found["gap/rerouted"] = float(apart.mean()) if len(apart) else 0.0
    return found


def records_of(taken: Taken, credit: Credit, weights: TokenWeights, inspected: PerTurn) -> list[Record]:
    """Every group of the step for the archive; credit, weights and, where they were asked for, the learner's logprobs
    and entropies with those that were trained on."""
    sizes = [sum(len(trajectory.turns) for trajectory in group.trajectories) for group in taken.kept]
    scored = [[scores.reshape(-1, 2)[:, column] for scores in inspected] for column in (0, 1)] if inspected else []
    arrays = [split_by(values, sizes) for values in (credit, weights, *scored)]
    kept = [
        Record(group, True, *(tuple(array.astype(np.float32) for array in of_group) for of_group in per_turn))
        for group, *per_turn in zip(taken.kept, *arrays, strict=True)
    ]
    return [*kept, *(Record(group, False, (), ()) for group in taken.dropped)]


def split_by(items: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Consecutive stretches of the given sizes."""
    ends = np.cumsum(sizes).tolist()
    return [list(items[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def flat(batches: Sequence[Sequence[Any] | None]) -> list[Any]:
    return [item for batch in batches if batch is not None for item in batch]
