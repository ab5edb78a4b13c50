"""From a recipe to the model that training starts from: as it is, or warmed up by demonstrations."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from turnwise.assemble.attempts import limits
from turnwise.assemble.checks import check_model
from turnwise.assemble.engines import engine_of_nobody
from turnwise.assemble.environments import task_order
from turnwise.assemble.learner import layout_of, open_sft_learner, placed, tokens_per_pass
from turnwise.assemble.model import (
    check_group,
    check_turns,
    model_and_tokenizer,
    model_source,
    renderer_of,
)
from turnwise.assemble.models import ModelSource, reachable
from turnwise.assemble.provenance import differences, fingerprint_of, provenance
from turnwise.credit.correction import uncorrected
from turnwise.credit.scope import anchor_tokens
from turnwise.credit.teaching import imitate
from turnwise.credit.weighting import token_mean
from turnwise.data.cache import cache_folder, made_again, made_once
from turnwise.engines.base import vocabulary_of
from turnwise.envs.live import is_live
from turnwise.interop.transcripts.cell import ReadingNotes
from turnwise.interop.transcripts.formats import read_transcripts
from turnwise.learn.losses import likelihood
from turnwise.learn.objective import Objective
from turnwise.pretrained import CausalLM, ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.rollout.demonstrate import (
    ArchivedDemonstrations,
    Demonstrator,
    RecordedDemonstrations,
)
from turnwise.rollout.environments import DEMONSTRATED, Environments
from turnwise.rollout.render.renderer import Renderer
from turnwise.runs.archive import is_archive
from turnwise.runs.screen import Screen
from turnwise.schedule.tasks import Draw, TaskOrder
from turnwise.schedule.workers import inline
from turnwise.training import warm_start
from turnwise.training.loop import LoopParts, Settings, Stages
from turnwise.types import Group


async def starting_model(
    recipe: Recipe, environments: Environments, screen: Screen, seconds: dict[str, float], stop: asyncio.Event
) -> tuple[CausalLM, ChatTokenizer]:
    """The model that training starts from, whole, and its tokenizer."""
    source = await starting_source(recipe, environments, screen, seconds, stop, Path(gettempdir()))
    if source.is_here:
        return source.model, source.tokenizer
    return await model_and_tokenizer(recipe, environments, source.own_folder)


async def starting_source(
    recipe: Recipe,
    environments: Environments,
    screen: Screen,
    seconds: dict[str, float],
    stop: asyncio.Event,
    beside: Path,
) -> ModelSource:
    """The model that training starts from and its tokenizer. A warm start is made once and cached; the `seconds` that
    it took are added. What other processes have to read meanwhile is written into a folder `beside` others."""
    if not recipe.sft.updates:
        return await checked_source(recipe, environments)
    if live := [entry.label for entry in recipe.env if is_live(entry.name)]:
        screen.say(f"warm start: not kept, because {live[0]} is a class of this session; one of a module is kept")
        return await made_now(recipe, environments, screen, seconds, stop, beside)
    made_of = provenance(recipe)
    folder = cache_folder() / f"{warm_start.PREFIX}{fingerprint_of(made_of)}"
    if not recipe.sft.remake and warm_start.is_usable(folder, screen):
        screen.say(f"warm start: from {folder}, made {warm_start.when(folder)}; sft.remake=true makes it again")
        return await checked_source(recipe, environments, folder)
    if reason := warm_start.what_changed(made_of, differences):
        screen.say(f"warm start: {reason}")
    source = await made_now(recipe, environments, screen, seconds, stop, beside)
    write = made_again if recipe.sft.remake else made_once
    write(folder, partial(warm_start.save, source.model, source.tokenizer, made_of))
    return await checked_source(recipe, environments, folder) if recipe.cluster.is_spread else source


async def made_now(
    recipe: Recipe,
    environments: Environments,
    screen: Screen,
    seconds: dict[str, float],
    stop: asyncio.Event,
    beside: Path,
) -> ModelSource:
    """A warm start that is made, not found. That of a class which only a session has is always made: nothing can tell
    whether the class, or what it uses, is still what it was."""
    began = time.perf_counter()
    source = await checked_source(recipe, environments)
    with reachable(recipe, source, beside) as here:
        trained = await warm_up(recipe, environments, here, screen, stop)
    seconds["warm_start"] = time.perf_counter() - began
    return ModelSource(trained, source.tokenizer)


async def checked_source(recipe: Recipe, environments: Environments, path: Path | None = None) -> ModelSource:
    """A model and its tokenizer, once it is known that training can compute it."""
    source = await model_source(recipe, environments, path)
    check_model(recipe, source.model, source.tokenizer)
    return source


async def warm_up(
    recipe: Recipe, environments: Environments, source: ModelSource, screen: Screen, stop: asyncio.Event
) -> CausalLM:
    """The model, trained on demonstrations. Raises Stopped where `stop` is set before the end."""
    model = source.model
    async with demonstrating(recipe, environments, source, screen) as parts:
        weights = await warm_start.imitate(parts, screen, stop, environments.failures.sum_up)
        if not source.is_here:
            model = copy.deepcopy(model).to_empty(device="cpu")
        model.load_state_dict(weights)
    return model


@asynccontextmanager
async def demonstrating(
    recipe: Recipe, environments: Environments, source: ModelSource, screen: Screen | None = None
) -> AsyncIterator[LoopParts]:
    """What the loop works with in a warm start: demonstrations for attempts and likelihood for a loss."""
    model, tokenizer = source.model, source.tokenizer
    renderer = renderer_of(recipe, model, tokenizer)
    order, make_group = demonstrations(recipe, environments, renderer, model, screen)
    lay_out = layout_of(recipe, model)
    stages = Stages(
        make_group=make_group,
        keep=lambda group: bool(group.trajectories),
        plan=lambda turns: lay_out(turns, tokens_per_pass(recipe)),
        estimate=imitate,
        correct=uncorrected,
        targets=None,
        weigh=token_mean,
        anchor=anchor_tokens,
        objective=Objective(likelihood),
        run=inline,
    )
    nobody = engine_of_nobody(renderer)
    with placed(recipe) as site, closing(open_sft_learner(recipe, source, site)) as learner:
        yield LoopParts(settings=settings_of(recipe), stages=stages, learner=learner, engine=nobody, tasks=order)


def demonstrations(
    recipe: Recipe, environments: Environments, renderer: Renderer, model: CausalLM, screen: Screen | None
) -> tuple[TaskOrder, Callable[[Draw], Awaitable[Group]]]:
    """(in which order tasks are met, what demonstrates one): from a file of attempts or conversations, or by the
    environments' experts."""
    if recipe.sft.format == "turnwise" or (recipe.sft.format == "auto" and is_archive(Path(recipe.sft.data))):
        return archived_attempts(recipe, renderer, model)
    if recipe.sft.data:
        return transcribed_attempts(recipe, renderer, model, screen)
    supplies, noise = environments.demonstrating(), recipe.sft.noise
    expert = Demonstrator(supplies, renderer, limits(recipe), recipe.seed, noise, environments.plays)
    order = task_order(recipe, environments.tasks(DEMONSTRATED, recipe.sft.demonstrations))
    return order, lambda draw: expert.group(draw.task, draw.epoch)


def archived_attempts(
    recipe: Recipe, renderer: Renderer, model: CausalLM
) -> tuple[TaskOrder, Callable[[Draw], Awaitable[Group]]]:
    """Attempts of a file, in the order of the seed, once it is known that the model can compute them."""
    archived = ArchivedDemonstrations(Path(recipe.sft.data))
    vocabulary = vocabulary_of(model)
    for group in archived.groups.values():
        try:
            check_group(recipe, renderer, vocabulary, group)
        except ValueError as error:
            raise ValueError(f"{recipe.sft.data}, task {group.task.id}: {error}") from None

    async def make_group(draw: Draw) -> Group:
        return archived.group(draw.task)

    dataset = archived.tasks[0].dataset
    return TaskOrder({dataset: archived.tasks}, {dataset: 1.0}, recipe.seed), make_group


def transcribed_attempts(
    recipe: Recipe, renderer: Renderer, model: CausalLM, screen: Screen | None
) -> tuple[TaskOrder, Callable[[Draw], Awaitable[Group]]]:
    """Transcripts in the order of the seed, once it is known that the template writes all of them."""
    notes, source = ReadingNotes(), recipe.sft.data
    dataset = Path(source).stem or source
    recorded = RecordedDemonstrations(renderer, read_transcripts(source, recipe.sft.format, notes), dataset)
    if not recorded.tasks:
        raise ValueError(f"{source} holds no demonstrations")
    vocabulary = vocabulary_of(model)
    for task in recorded.tasks:
        place, (made,) = recorded.transcripts[task.id].place, recorded.group(task).trajectories
        try:
            check_turns(recipe, vocabulary, made.turns)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    trained = sum(sum(one.trained) for one in recorded.transcripts.values())
    lines = [f"{source}: {len(recorded.tasks)} transcripts, of which {trained} messages are trained"]
    if notes.ignored:
        listed = ", ".join(f"{name} ({count})" for name, count in notes.ignored.most_common(12))
        lines.append(f"{source}: fields that are not read, with the number of times: {listed}")
    if screen is not None:
        for line in lines:
            screen.say(line)

    async def make_group(draw: Draw) -> Group:
        return recorded.group(draw.task)

    return TaskOrder({dataset: recorded.tasks}, {dataset: 1.0}, recipe.seed), make_group


def settings_of(recipe: Recipe) -> Settings:
    return Settings(
        steps=recipe.sft.updates,
        max_lag=0,
        groups_per_step=recipe.sft.batch,
        groups_per_update=recipe.sft.batch,
        epochs=1,
        anchor="learner",
        needs=frozenset(),
        success_at=recipe.rollout.success_threshold,
        max_nonfinite_updates=recipe.guards.max_nonfinite_updates,
        max_dropped_groups=recipe.guards.max_dropped_groups,
        order="started",
        slots=recipe.sft.batch,
        stale="drop_group",
        patience=recipe.schedule.stall_warning_seconds,
        max_logprob_gap=math.inf,
    )
