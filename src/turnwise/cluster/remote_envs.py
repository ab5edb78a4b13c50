"""Environments that run in actors of a Ray cluster, because they need a separate process or machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from turnwise.cluster.placement import connect
from turnwise.envs.base import Environment, Reply
from turnwise.envs.capabilities import is_batchable
from turnwise.envs.raised import Raised, carrying
from turnwise.messages import Message
from turnwise.recipe.cluster import ClusterConfig
from turnwise.rollout.batching.microbatch import Lane
from turnwise.rollout.calls import EnvironmentFailure, call
from turnwise.rollout.failures import Failures
from turnwise.rollout.open_limit import EnvironmentMaker, OpenLimit, default_open_limit
from turnwise.types import Task

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""Between two checks of an actor."""


class EnvironmentActor:
    """A process of the cluster that runs environments, each with a number."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.make = make
        self.open_ones: dict[int, Environment] = {}

    async def check(self) -> None:
        """Returns where the process answers."""

    async def open(self, number: int, task: Task) -> Reply:
        with source_attached():
            self.open_ones[number] = self.make()
            reply: Reply = await call(self.open_ones[number].open, task)
        return reply

    async def step(self, number: int, message: Message) -> Reply:
        with source_attached():
            reply: Reply = await call(self.open_ones[number].step, message)
        return reply

    async def close(self, number: int) -> Reply | None:
        environment = self.open_ones.pop(number, None)
        with source_attached():
            reply: Reply | None = None if environment is None else await call(environment.close)
        return reply


@contextmanager
def source_attached() -> Iterator[None]:
    """Attach to an error where it was raised: Ray sends no traceback with the error itself."""
    try:
        yield
    except Exception as error:
        carrying(error, Raised.of(error))
        raise


class RemoteEnvironments:
    """Spreads the environments of one class over actors, in turn. Their calls are not batched. An `EnvironmentHost`.

    An actor whose process dies, or does not answer for `cluster.answer_seconds`, is replaced; attempts whose
    environments it had fail, and are retried like others.

    Example:
        remote = RemoteEnvironments(Browser, actors=8, cluster=recipe.cluster)
        make = remote.wrap(partial(Browser, headless=True), lane)
    """

    def __init__(
        self,
        kind: Any,
        *,
        actors: int,
        cluster: ClusterConfig,
        open_limit: OpenLimit | None = None,
        failures: Failures | None = None,
    ) -> None:
        if is_batchable(kind):
            raise ValueError(
                f"{kind.__name__} combines calls in step_many, which env.concurrency.actors prevents; remove one"
            )
        self.open_limit = open_limit or OpenLimit(default_open_limit(kind))
        self.failures = failures or Failures()
        self.num_actors = actors
        self.cluster = cluster
        self.actors: list[Any] = []
        self.watching: list[asyncio.Task[None]] = []
        """One task per actor, in the event loop that makes environments."""
        self.numbers = count()

    def wrap(self, make: Callable[[], Environment], lane: Lane) -> EnvironmentMaker:
        """Makes environments in actors. The actors start with the first environment."""

        def make_remote() -> Environment:
            if not self.actors:
                self.start(make)
            number = next(self.numbers)
            return RemoteEnvironment(self.actors[number % self.num_actors], number)

        return EnvironmentMaker(make_remote, self.open_limit, self.failures)

    def report(self) -> dict[str, float]:
        """No metrics: nothing is queued here."""
        return {}

    def start(self, make: Callable[[], Environment]) -> None:
        import ray

        connect(self.cluster.address)
        actor = ray.remote(EnvironmentActor).options(num_cpus=1, max_concurrency=100_000)
        self.actors = [actor.remote(make) for _ in range(self.num_actors)]
        loop = asyncio.get_running_loop()
        self.watching = [loop.create_task(self.watch(place, actor, make)) for place in range(self.num_actors)]

    async def watch(self, place: int, kind: Any, make: Callable[[], Environment]) -> None:
        """Replace the actor at a place whenever it dies or does not answer. A start may take any time."""
        import ray
        from ray.exceptions import RayError

        while True:
            actor = self.actors[place]
            try:
                await actor.check.remote()
                while True:
                    await asyncio.sleep(CHECK_SECONDS)
                    async with asyncio.timeout(self.cluster.answer_seconds):
                        await actor.check.remote()
            except TimeoutError:
                reason = f"it does not answer in {self.cluster.answer_seconds:g} s"
            except RayError:
                reason = "its process has ended"
            log.warning("environment actor %d is started again: %s", place, reason)
            ray.kill(actor)
            self.actors[place] = kind.remote(make)
            await asyncio.sleep(CHECK_SECONDS)  # one that cannot start is not tried without a pause

    def close(self) -> None:
        import ray

        for task in self.watching:
            task.cancel()
        for actor in self.actors:
            ray.kill(actor)
        self.actors, self.watching = [], []


class RemoteEnvironment:
    """`Environment` in an actor. Errors of the environment are raised here too. If an actor dies, its attempts fail."""

    def __init__(self, actor: Any, number: int) -> None:
        self.actor = actor
        self.number = number

    async def open(self, task: Task) -> Reply:
        reply: Reply = await self.answer(self.actor.open.remote(self.number, task))
        return reply

    async def step(self, message: Message) -> Reply:
        reply: Reply = await self.answer(self.actor.step.remote(self.number, message))
        return reply

    async def close(self) -> Reply | None:
        reply: Reply | None = await self.answer(self.actor.close.remote(self.number))
        return reply

    async def answer(self, call: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return await call
        except RayTaskError as error:
            raise error.cause from None
        except RayError:
            lost = "the actor of its environment has ended"
            raise carrying(EnvironmentFailure(lost), Raised("EnvironmentFailure", "", lost, "")) from None
