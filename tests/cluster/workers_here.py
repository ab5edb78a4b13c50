"""Rollout workers in the event loop of a test: the real worker, line, link and pool, without a process."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from support.acting import limits, renderer, user
from turnwise import frames
from turnwise.cluster.rollout_pool import RolloutPool
from turnwise.cluster.rollout_worker import RolloutWorker, WorkerParts
from turnwise.cluster.worker_desk import WorkerDesk
from turnwise.engines.base import Engine, Sampling
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.rollout.environment_host import EnvironmentHost
from turnwise.rollout.environments import DatasetEnvironments, Environments
from turnwise.rollout.failures import Failures
from turnwise.rollout.group import AttemptMaker
from turnwise.rollout.open_limit import EnvironmentMaker, OpenLimit
from turnwise.types import Task


class Counts:
    """An environment of three turns, that counts those that are open; a task may have it wait, or fail."""

    open_now = most_open = 0

    async def open(self, task: Task) -> Reply:
        Counts.open_now += 1
        Counts.most_open = max(Counts.most_open, Counts.open_now)
        self.turn, self.task = 0, task
        return Reply(user(f"start {task.id}"))

    async def step(self, message: Message) -> Reply:
        self.turn += 1
        if self.task.data.get("fails"):
            raise ValueError("this one fails")
        if self.task.data.get("waits"):
            await asyncio.get_running_loop().create_future()
        return Reply(user(f"turn {self.turn}"), finished=self.turn == 3, outcome=float(self.turn == 3))

    async def close(self) -> None:
        Counts.open_now -= 1


class HostHere:
    """`WorkerHost` whose worker is a task of this loop. `kill` ends it as a signal would: its line is closed."""

    started: list[HostHere]

    def __init__(self, number: int) -> None:
        self.number = number
        self.task: asyncio.Task[None] | None = None
        HostHere.started.append(self)

    async def connect(self) -> socket.socket:
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.task = asyncio.create_task(self.serve())
        return ours

    async def serve(self) -> None:
        size = frames.length_of(await frames.receive_exactly_async(self.theirs, frames.HEAD))
        [(_, make, is_ordered)] = pickle.loads(await frames.receive_exactly_async(self.theirs, size))
        desk = WorkerDesk()
        await RolloutWorker(pickle.loads(make)(desk), desk, is_ordered).serve(self.theirs)

    async def ended(self, seconds: float) -> None:
        if self.task is not None:
            await asyncio.wait([self.task], timeout=seconds)

    def how_it_ended(self) -> str:
        return f"worker {self.number} is gone"

    def kill(self) -> None:
        assert self.task is not None
        self.task.cancel()


def parts(desk: WorkerDesk, retries: int = 0) -> WorkerParts:
    makers = {"e": EnvironmentMaker(Counts, desk.open_limit("e"), desk.failures)}
    engine = desk.engine("training", 4096)
    return WorkerParts({"train": maker_of(makers, engine, retries)}, Environments({}, desk.failures), 60.0)


def maker_of(environments: Any, engine: Engine, retries: int = 0) -> AttemptMaker:
    sampling, split = Sampling(99), "train"
    return AttemptMaker(
        environments, engine, renderer(), sampling, limits(), seed=0, split=split, attempts=3, retries=retries
    )


class NoHost:
    """The run's own environments, of which none is used."""

    def report(self) -> dict[str, float]:
        return {}


def environments_of_run(most_open: int = 99) -> Environments:
    nobody: Any = NoHost()
    host: EnvironmentHost = nobody
    lane: Any = None
    dataset = DatasetEnvironments(
        make=Counts,
        make_heldout=Counts,
        draw=lambda split, count: [],
        host=host,
        open_limit=OpenLimit(most_open),
        training=lane,
        validation=lane,
    )
    return Environments({"e": dataset}, Failures())


@asynccontextmanager
async def pool_here(
    engine: Engine,
    workers: int = 2,
    make: Callable[[WorkerDesk], WorkerParts] = parts,
    environments: Environments | None = None,
    start: Callable[[int], Any] = HostHere,
    **settings: Any,
) -> AsyncIterator[RolloutPool]:
    HostHere.started = []
    Counts.open_now = Counts.most_open = 0
    environments = environments or environments_of_run()
    engines = {"training": engine}
    async with RolloutPool(start, workers, pickle.dumps(make), engines, environments, **settings) as pool:
        yield pool
