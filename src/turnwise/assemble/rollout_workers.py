"""From a recipe to its rollout workers: processes with environments and renderer of their own, and the engines of the
run."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from turnwise.assemble.attempts import evaluation_attempts, training_attempts
from turnwise.assemble.environments import agent_of, endpoint_of, environments_of, seats_of
from turnwise.cluster.rollout_pool import STALL_SECONDS, RolloutPool
from turnwise.cluster.rollout_worker import WorkerParts
from turnwise.cluster.worker_desk import WorkerDesk
from turnwise.cluster.worker_host import ActorHost, ProcessHost, WorkerHost
from turnwise.engines.base import Engine
from turnwise.envs.live import refuse_processes
from turnwise.pretrained import ChatTokenizer
from turnwise.recipe.schema import Recipe
from turnwise.rollout.environments import Environments
from turnwise.rollout.group import AttemptMaker, GroupMaker
from turnwise.rollout.render.renderer import Renderer

KEY = "cluster.rollout_workers"


def check_workers(recipe: Recipe) -> None:
    """Refuse what attempts in other processes cannot do."""
    if not recipe.cluster.rollout_workers:
        return
    for entry in recipe.env:
        refuse_processes(entry.name, KEY)
        if agent_of(entry) is not None:
            raise ValueError(
                f"{KEY}: an agent drives {entry.label} through the endpoint of the run's own process; remove {KEY}"
            )
        if entry.concurrency.actors:
            raise ValueError(
                f"{KEY}: the environments of {entry.label} are in processes already; remove it, or "
                "env.concurrency.actors"
            )
    frozen = {model for models in seats_of(recipe).values() for model in models} - {"policy"}
    if frozen:
        raise ValueError(
            f'{KEY}: env.settings.opponent = "{min(frozen)}" is played by an engine that only the run\'s own process '
            'has; remove it, or set opponent = "self"'
        )


@asynccontextmanager
async def rollout_pool(
    recipe: Recipe, environments: Environments, renderer: Renderer, engine: Engine, evaluation_engine: Engine
) -> AsyncIterator[RolloutPool | None]:
    """The rollout workers of a run, ready; None where it makes its attempts itself."""
    cluster = recipe.cluster
    if not cluster.rollout_workers:
        yield None
        return
    engines = {"training": engine, "evaluation": evaluation_engine}
    contexts = {name: each.context for name, each in engines.items()}
    make = pickle.dumps(partial(worker_parts, recipe, renderer.tokenizer, renderer.end_tokens, contexts))
    stall_seconds = recipe.rollout.limits.blocked_seconds + STALL_SECONDS

    def start(number: int) -> WorkerHost:
        return ActorHost(number, cluster) if cluster.on_ray else ProcessHost(number)

    async with RolloutPool(
        start, cluster.rollout_workers, make, engines, environments, stall_seconds=stall_seconds
    ) as pool:
        yield pool


def training_groups(here: AttemptMaker, pool: RolloutPool | None) -> GroupMaker:
    """Makes groups to train on: in this process, or in workers."""
    return here if pool is None else pool.attempts("train", here.attempts)


def heldout_groups(
    recipe: Recipe,
    environments: Environments,
    engine: Engine,
    renderer: Renderer,
    pool: RolloutPool | None,
    greedy: bool,
) -> GroupMaker:
    """Makes groups of an evaluation, likewise."""
    here = evaluation_attempts(recipe, environments, engine, renderer, greedy)
    return here if pool is None else pool.attempts("greedy" if greedy else "sampled", here.attempts)


def worker_parts(
    recipe: Recipe, tokenizer: ChatTokenizer, end_tokens: Sequence[int], contexts: dict[str, int], desk: WorkerDesk
) -> WorkerParts:
    """What a worker works with, made in its process."""
    limits = {entry.label: desk.open_limit(entry.label) for entry in recipe.env}
    environments = environments_of(recipe, endpoint_of(recipe), limits, desk.failures)
    rollout = recipe.rollout
    renderer = Renderer(tokenizer, rollout.history, rollout.tools, end_tokens, trust_text=rollout.rendering.trust_text)
    training, evaluation = (desk.engine(name, contexts[name]) for name in ("training", "evaluation"))
    seats = {label: [training] * len(models) for label, models in seats_of(recipe).items()}
    held_out = partial(evaluation_attempts, recipe, environments, evaluation, renderer)
    makers = {
        "train": training_attempts(recipe, environments, training, renderer, seats),
        "sampled": held_out(greedy=False),
        "greedy": held_out(greedy=True),
    }
    return WorkerParts(makers, environments, rollout.limits.blocked_seconds)
