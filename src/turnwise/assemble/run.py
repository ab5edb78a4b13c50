"""From a recipe, or the folder of a run, to a run that is ready to train. Whoever enters one of these contexts leaves
nothing behind: engines, ranks, placements, ports and environments are closed in the reverse order of their making."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.assemble import objective
from turnwise.assemble.attempts import training_attempts
from turnwise.assemble.checks import check, check_tasks, few_tasks, with_models
from turnwise.assemble.engines import cluster_engine, engine_of, evaluation_engine_of
from turnwise.assemble.environments import endpoint_of, environments_of, training_order
from turnwise.assemble.learner import (
    layout_of,
    open_learner,
    placed,
    policy_of,
    room_of,
    tokens_per_pass,
    told_of_layout,
)
from turnwise.assemble.model import gpu_names, model_source, renderer_of, set_threads
from turnwise.assemble.models import ModelSource, copy_model, reachable
from turnwise.assemble.opponents import seated_engines
from turnwise.assemble.resumed_recipe import keeps_start, resumed_recipe
from turnwise.assemble.rollout_workers import heldout_groups, rollout_pool, training_groups
from turnwise.assemble.servers import check_servers
from turnwise.assemble.warm_start import starting_source
from turnwise.assemble.weight_check import weight_check_of
from turnwise.atomic import atomic_folder
from turnwise.cluster.placement import check_room
from turnwise.cluster.rollout_pool import RolloutPool
from turnwise.credit.failure import ON_FAILURE
from turnwise.engines.base import Engine
from turnwise.engines.remote.fork_server import forked_children
from turnwise.evaluation.evaluator import Evaluator
from turnwise.plan.plan import Plan
from turnwise.pretrained import CausalLM
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environments import Environments
from turnwise.rollout.render.renderer import Renderer
from turnwise.runs import archive
from turnwise.runs.checkpoint import Checkpoint, written_steps
from turnwise.runs.checksums import write_checksums
from turnwise.runs.folder import RunFolder
from turnwise.runs.lock import owned
from turnwise.runs.machine import record_machine
from turnwise.runs.screen import Screen
from turnwise.runs.tracker import JsonLines, Several, Tracker, read_metrics
from turnwise.runs.trackers.names import open_trackers
from turnwise.runs.trust import Trust, stamp_where_asked
from turnwise.runs.why.watcher import Watcher
from turnwise.schedule.stopping import RunStopped
from turnwise.schedule.stream import MakeGroup
from turnwise.schedule.tasks import Draw
from turnwise.schedule.workers import Worker, Workers, in_own_thread, inline
from turnwise.training.loop import Arrived, LoopParts, Settings, Stages, unchecked
from turnwise.training.run import WAITING, Run, RunParts
from turnwise.training.state import State
from turnwise.training.warm_start import Stopped
from turnwise.training.weight_check import WeightCheck
from turnwise.types import Group, Turn

Plans = Callable[[Sequence[Turn]], list[Plan]]
"""How turns are laid out."""
OpenParts = Callable[..., AbstractAsyncContextManager[RunParts]]
"""Opens the parts of a run, as `run_parts` does."""
CHILD_MODULES = ("turnwise.assemble.engines", "turnwise.assemble.learner")
"""What processes of a run import: its ranks and its engines."""

# ---------------------------------------------------------------- runs


async def start(
    recipe: Recipe, screen: Screen, stop: asyncio.Event, workers: Workers = in_own_thread
) -> dict[str, Any] | None:
    """Train a recipe from its start: the summary, or None where it was stopped."""
    async with training(recipe, screen, stop, workers) as run:
        return await run.to_end(stop)


async def resume(
    path: Path,
    screen: Screen,
    stop: asyncio.Event,
    workers: Workers = in_own_thread,
    overrides: Sequence[str] = (),
    trust: Trust = "ask",
) -> dict[str, Any] | None:
    """Go on with a run: the summary, or None where it was stopped."""
    async with resuming(path, screen, stop, workers, overrides, trust) as run:
        return await run.to_end(stop)


@asynccontextmanager
async def training(
    recipe: Recipe,
    screen: Screen,
    stop: asyncio.Event,
    workers: Workers = in_own_thread,
    open_parts: OpenParts | None = None,
    origin: str = "",
) -> AsyncIterator[Run]:
    """A new run in its folder, its warm start made. A start that fails before the first checkpoint leaves no folder.
    A run with other parts than those that sample says so in its folder by its origin."""
    recipe = with_models(recipe, screen.say)
    check(recipe)
    if recipe.cluster.on_ray:
        check_room(recipe.cluster, room_of(recipe))
    await check_servers(recipe)
    with owned(RunFolder.make(recipe.out).path):
        stamp_of = partial(stamp_where_asked, recipe)
        folder = RunFolder.create(recipe.out, recipe.model_dump(mode="json"), stamp_of, origin)
        try:
            async with started(recipe, folder, screen, stop, workers, open_parts) as run:
                yield run
        except (Stopped, asyncio.CancelledError, KeyboardInterrupt):  # and can be resumed
            raise
        except BaseException:
            if not written_steps(folder.checkpoints):
                folder.clear()
            raise


@asynccontextmanager
async def resuming(
    path: Path,
    screen: Screen,
    stop: asyncio.Event,
    workers: Workers = in_own_thread,
    overrides: Sequence[str] = (),
    trust: Trust = "ask",
    open_parts: OpenParts | None = None,
) -> AsyncIterator[Run]:
    """A run as its last checkpoint left it, or at its start where it has never come to one; what it recorded after that
    is cut away and made again. Overrides may change what its state does not depend on."""
    folder = RunFolder.open(path)
    if folder.origin.exists() and open_parts is None:
        raise ValueError(f'{path} is made of another run; go on with it by "turnwise train --resume {path}"')
    with owned(folder.path):
        recipe, checkpoint = resumed_recipe(folder, overrides, trust, screen)
        await check_servers(recipe)
        if checkpoint is None:
            opened = started(recipe, folder, screen, stop, workers, open_parts)
        else:
            opened = restored(recipe, folder, checkpoint, screen, workers, open_parts)
        async with opened as run:
            yield run


@asynccontextmanager
async def started(
    recipe: Recipe,
    folder: RunFolder,
    screen: Screen,
    stop: asyncio.Event,
    workers: Workers = in_own_thread,
    open_parts: OpenParts | None = None,
) -> AsyncIterator[Run]:
    """A run before its first evaluation."""
    record_machine(folder.machine, 0, gpu_names())
    set_threads(recipe)
    state = State()
    with open_environments(recipe) as environments:
        check_tasks(recipe, environments)
        for warning in few_tasks(recipe, environments):
            screen.say(warning)
        with closing(open_tracker(recipe, folder, say=screen.say)) as tracker:
            source = await starting_source(recipe, environments, screen, state.seconds, stop, folder.path)
            for line in told_of_layout(recipe, source.model):
                screen.say(line)
            if keeps_start(recipe):
                with atomic_folder(folder.reference) as aside:
                    copy_model(source, aside)
                    write_checksums(aside)
            with reachable(recipe, source, folder.path) as source:
                opened = (open_parts or run_parts)(recipe, environments, source, folder.evaluations, workers=workers)
                async with opened as parts:
                    yield Run(recipe, folder, parts, state, screen, tracker)


@asynccontextmanager
async def restored(
    recipe: Recipe,
    folder: RunFolder,
    checkpoint: Checkpoint,
    screen: Screen,
    workers: Workers = in_own_thread,
    open_parts: OpenParts | None = None,
) -> AsyncIterator[Run]:
    """A run as its checkpoint left it."""
    record_machine(folder.machine, checkpoint.step, gpu_names())
    set_threads(recipe)
    with (
        open_environments(recipe) as environments,
        closing(open_tracker(recipe, folder, checkpoint.step, screen.say)) as tracker,
    ):
        path = folder.reference if recipe.lora.rank else checkpoint.path
        source = await model_source(recipe, environments, path)
        async with (open_parts or run_parts)(
            recipe, environments, source, folder.evaluations, checkpoint, folder.reference, workers
        ) as parts:
            run = Run(recipe, folder, parts, State.from_json(checkpoint.state), screen, tracker)
            run.last_checkpoint = checkpoint.step
            [step] = archive.archived_steps(checkpoint.path / WAITING)
            records = archive.read_step(checkpoint.path / WAITING / f"step-{step:06d}.parquet")
            run.waiting = {number: record.group for number, record in zip(run.state.waiting, records, strict=True)}
            screen.say(f"resuming {folder.path} after step {checkpoint.step}")
            yield run


@contextmanager
def open_environments(recipe: Recipe) -> Iterator[Environments]:
    """The environments of a recipe and the endpoint of the agents that drive them, which listens once one needs it."""
    with closing(endpoint_of(recipe)) as endpoint, closing(environments_of(recipe, endpoint)) as environments:
        yield environments


def open_tracker(
    recipe: Recipe, folder: RunFolder, after: int = -1, say: Callable[[str], None] = lambda text: None
) -> Tracker:
    """metrics.jsonl and the trackers of the recipe, which a resume has go on after a step."""
    own, tree = JsonLines(folder.metrics), recipe.model_dump(mode="json")
    watcher = Watcher(recipe, read_metrics(folder.metrics))
    others = open_trackers(recipe.trackers, tree, recipe.tracking.project, folder, after)
    for other in others:
        say(f"{other.name}: {other.where}")
    return Several([own, *others, watcher])


# ---------------------------------------------------------------- their parts


@asynccontextmanager
async def run_parts(
    recipe: Recipe,
    environments: Environments,
    source: ModelSource,
    evaluations: Path,
    checkpoint: Checkpoint | None = None,
    beginning: Path | None = None,
    workers: Workers = in_own_thread,
) -> AsyncIterator[RunParts]:
    """The parts of a run, at its start or as a checkpoint left them; `beginning` is the folder of the model that
    training started from, where that is not the source itself, and `workers` make the calls of engines and learner
    where these overlap. Engines are open, and the one of training is known to compute what the learner does."""
    step = checkpoint.step if checkpoint else 0
    model, tokenizer = source.model, source.tokenizer
    renderer = renderer_of(recipe, model, tokenizer)
    plain = without_adapters(recipe, model)
    record = workers("record")
    async with AsyncExitStack() as stack:
        stack.enter_context(forked_children([*CHILD_MODULES, type(model).__module__]))
        site = stack.enter_context(placed(recipe))
        learner = stack.enter_context(closing(open_learner(recipe, source, beginning, site)))
        if site is None or recipe.engine.servers:
            shared = model if recipe.engine_shares_weights else plain
            engine = engine_of(recipe, shared, renderer, step, workers)
        else:
            engine = cluster_engine(recipe, source, step, site)
        await stack.enter_async_context(opened(engine))
        evaluation_engine = engine
        if recipe.schedule.overlap_evaluations:
            evaluation_engine = evaluation_engine_of(recipe, plain, renderer, step, workers)
            await stack.enter_async_context(opened(evaluation_engine))
        pooled = rollout_pool(recipe, environments, renderer, engine, evaluation_engine)
        pool = await stack.enter_async_context(pooled)
        evaluator = evaluator_of(recipe, environments, evaluation_engine, renderer, evaluations, record, pool)
        stack.push_async_callback(evaluator.stop)
        if checkpoint is not None:
            learner.restore(checkpoint.path)
        if begins_otherwise(recipe, source, checkpoint):
            await engine.load(learner.publish(), step)
        run = workers("learner") if recipe.max_lag or recipe.schedule.overlap_evaluations else inline
        lay_out = layout_of(recipe, model)
        plan: Plans = lambda turns: lay_out(turns, tokens_per_pass(recipe))
        weight_check = weight_check_of(recipe, engine, learner, plan, run, model, tokenizer)
        seats = await stack.enter_async_context(seated_engines(recipe, engine, plain, renderer, beginning))
        attempts = training_groups(training_attempts(recipe, environments, engine, renderer, seats), pool)
        stages = stages_of(recipe, lambda draw: attempts.group(draw.task, draw.epoch), plan, run, weight_check.arrived)
        order = training_order(recipe, environments)
        loop = LoopParts(settings=settings_of(recipe), stages=stages, learner=learner, engine=engine, tasks=order)
        yield RunParts(
            loop=loop,
            evaluator=evaluator,
            environments=environments,
            tokenizer=tokenizer,
            save=workers("checkpoint"),
            record=record,
            start_metrics=await metrics_at_start(weight_check, step),
        )


def evaluator_of(
    recipe: Recipe,
    environments: Environments,
    engine: Engine,
    renderer: Renderer,
    folder: Path,
    record: Worker,
    pool: RolloutPool | None = None,
) -> Evaluator:
    return Evaluator(
        engine,
        partial(heldout_groups, recipe, environments, engine, renderer, pool),
        folder,
        success_at=recipe.rollout.success_threshold,
        decode=renderer.decode,
        stops_when_hopeless=not ON_FAILURE[recipe.rollout.failures.on_failure.name].counts_failures,
        record=record,
    )


def begins_otherwise(recipe: Recipe, source: ModelSource, checkpoint: Checkpoint | None) -> bool:
    """Whether the engine begins with other weights than the learner: with those of the model without its adapters, or,
    as a server that nobody has given any, with those that it was started with."""
    return bool((recipe.lora.rank and checkpoint is not None) or (recipe.engine.servers and not source.is_here))


@asynccontextmanager
async def opened(engine: Engine) -> AsyncIterator[Engine]:
    """An engine that is ready before there is a call whose deadline would count its start, closed afterwards."""
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()


def stages_of(recipe: Recipe, make: MakeGroup, plan: Plans, run: Worker, arrived: Arrived = unchecked) -> Stages:
    """The functions of a step, as the recipe names them, given what makes groups."""
    settle = objective.failure_of(recipe)

    async def make_group(draw: Draw) -> Group:
        return settle(await make(draw))

    return Stages(
        make_group=make_group,
        keep=objective.keep_of(recipe),
        plan=plan,
        estimate=objective.estimate_of(recipe),
        correct=objective.correct_of(recipe),
        targets=objective.targets_of(recipe),
        weigh=objective.weighting_of(recipe),
        anchor=objective.ratio_of(recipe).compare,
        objective=objective.objective_of(recipe),
        run=run,
        arrived=arrived,
    )


async def metrics_at_start(weight_check: WeightCheck, version: int) -> Mapping[str, float]:
    """What the weight check measures before anything is trained. RunStopped where the engine does not compute what the
    learner does."""
    if (found := await weight_check.begin(version)).problem:
        raise RunStopped(found.problem)
    return found.metrics


def without_adapters(recipe: Recipe, model: CausalLM) -> CausalLM:
    """The model that engines make copies of: another one where the learner is about to put adapters into it."""
    shares = recipe.engine_shares_weights and not recipe.schedule.overlap_evaluations
    if not recipe.lora.rank or recipe.cluster.is_spread or shares:
        return model
    policy_of(recipe, model)  # which makes it ready for an engine
    return copy.deepcopy(model)


def settings_of(recipe: Recipe) -> Settings:
    return Settings(
        steps=recipe.steps,
        max_lag=recipe.max_lag,
        groups_per_step=recipe.groups_per_step,
        groups_per_update=recipe.groups_per_update or recipe.groups_per_step,
        epochs=recipe.epochs,
        anchor=objective.ratio_of(recipe).anchor,
        needs=objective.needs(recipe),
        success_at=recipe.rollout.success_threshold,
        max_nonfinite_updates=recipe.guards.max_nonfinite_updates,
        max_dropped_groups=recipe.guards.max_dropped_groups,
        order=recipe.schedule.order,
        slots=recipe.lag_slots,
        stale=recipe.schedule.stale,
        patience=recipe.schedule.stall_warning_seconds,
        max_logprob_gap=objective.max_logprob_gap_of(recipe),
    )
