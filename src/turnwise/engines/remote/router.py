"""The router: several replicas of an engine behind one. A replica that dies costs time and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from turnwise.engines.base import Completion, Engine, EngineFailure, Sampling, checked_prompt
from turnwise.types import Tokens
from turnwise.weights.published import Published

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""Between two checks of a replica's health."""
ANSWER_SECONDS = 60.0
"""How long a replica may take to answer one."""
STARTS = 3
"""How often in a row a replica may fail to start before its place is given up."""
HOMES = 1 << 16
"""Sessions whose replica is remembered."""


class Replica(Engine, Protocol):
    """An engine whose health can be asked for."""

    async def check(self) -> None:
        """Returns when the engine answers; an EngineFailure says that it never will."""
        ...


class Store(Protocol):
    """Where weights are put for replicas to read; a `Publisher`, or what a cluster has in its place."""

    @property
    def newest(self) -> Any:
        """What was published last, with its version; None before that."""
        ...

    def publish(self, weights: Mapping[str, Any], version: int) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class Place:
    """Where a replica is, or will be again."""

    def __init__(self, number: int, replica: Replica) -> None:
        self.number = number
        self.replica = replica
        self.ready = asyncio.Event()
        self.ready.set()
        self.given_up = ""
        """Why no replica comes back here; empty where one is or will be."""
        self.calls = 0
        """Calls under way."""
        self.served = 0
        """Calls answered, by all replicas that were here."""
        self.starts = 1
        """Replicas that were here."""
        self.past_seconds = 0.0
        """Seconds inside the model of those that are gone."""

    @property
    def seconds(self) -> float:
        return self.past_seconds + self.replica.seconds


class Router:
    """`Engine` over replicas. A session stays with the replica that has its prefixes; a new one goes to the replica
    with the fewest calls under way. A call whose replica dies is made again by another, with the same seed; the dead
    one is started again, and is used again once it has the present weights.

    Example:
        start = lambda number: ProcessEngine(make, outline, publisher, context=4096, name=f"replica {number}")
        engine = Router(start, 2, publisher)
    """

    shares_weights = False

    def __init__(
        self,
        start: Callable[[int], Replica],
        replicas: int,
        publisher: Store,
        *,
        check_seconds: float = CHECK_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """`start` makes the replica of a place, which reads the newest weights that are published; the router closes
        the publisher when it is closed."""
        self.start = start
        self.publisher = publisher
        self.check_seconds = check_seconds
        self.answer_seconds = answer_seconds
        self.places = [Place(number, start(number)) for number in range(replicas)]
        self.context = min(place.replica.context for place in self.places)
        self.homes: dict[str, Place] = {}
        self.changing = asyncio.Lock()  # held while weights and pauses change, and while a replica comes back
        self.paused = self.closed = False
        self.version: int | None = None
        """Of the last load; None before the first."""
        self.work: set[asyncio.Task[None]] = set()
        self.watching: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """Seconds inside the model, summed over replicas, those that died included: with several it may exceed the time
        that passed."""
        return sum(place.seconds for place in self.places)

    # ------------------------------------------------------------ calls

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        prompt = checked_prompt(prompt, seed, context=self.context)
        self.watch()
        tries = 2 * len(self.places) + 1
        while True:
            place = await self.place_of(session)
            replica = place.replica
            place.calls += 1
            try:
                completion = await replica.generate(prompt, sampling, session=session, seed=seed)
            except EngineFailure as error:
                tries -= 1
                self.homes.pop(session, None)
                if self.closed or not tries:
                    raise
                log.warning("a call is made again elsewhere: %s", error)
                await self.examine(place, replica)
            else:
                place.served += 1
                return completion
            finally:
                place.calls -= 1

    async def place_of(self, session: str) -> Place:
        """Where the calls of a session go: to where they went before, or to the place with the fewest, as soon as one
        has a replica."""
        while True:
            if self.closed:
                raise EngineFailure("the engine was closed")
            home = self.homes.get(session)
            if home is not None and home.ready.is_set():
                return home
            ready = [place for place in self.places if place.ready.is_set()]
            if ready:
                home = self.homes[session] = min(ready, key=lambda place: place.calls)
                if len(self.homes) > HOMES:
                    del self.homes[next(iter(self.homes))]
                return home
            coming = [place for place in self.places if not place.given_up]
            if not coming:
                raise EngineFailure(f"no replica is left: {self.places[0].given_up}")
            waits = [asyncio.ensure_future(place.ready.wait()) for place in coming]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=self.check_seconds)
            finally:
                for wait in waits:
                    wait.cancel()

    async def abort(self, session: str) -> None:
        home = self.homes.get(session)
        if home is not None and home.ready.is_set():
            with suppress(EngineFailure):  # its call is made again, and nobody waits for it any more
                await home.replica.abort(session)

    # ------------------------------------------------------------ health

    def watch(self) -> None:
        if self.watching is None:
            self.watching = asyncio.create_task(self.keep_watch(), name="router")

    async def keep_watch(self) -> None:
        """Look after replicas that nobody calls, and those that never answer; to start may take as long as it takes."""
        await self.all(lambda replica: replica.check())
        while True:
            await asyncio.sleep(self.check_seconds)
            ready = [place for place in self.places if place.ready.is_set()]
            await asyncio.gather(*(self.examine(place, place.replica) for place in ready))

    async def examine(self, place: Place, replica: Replica) -> None:
        """Have a replica replaced that is dead, or as good as that."""
        try:
            async with asyncio.timeout(self.answer_seconds):
                await replica.check()
        except (EngineFailure, TimeoutError) as error:
            if place.replica is replica and place.ready.is_set() and not self.closed:
                place.ready.clear()
                log.warning("replica %d is started again: %s", place.number, error or "it does not answer")
                task = asyncio.create_task(self.revive(place), name=f"replica {place.number} comes back")
                self.work.add(task)
                task.add_done_callback(self.work.discard)

    async def revive(self, place: Place) -> None:
        """Put another replica in place, with the present weights."""
        reason = ""
        for _ in range(STARTS):
            await place.replica.close()
            try:
                place.past_seconds, place.replica = place.seconds, self.start(place.number)
                place.starts += 1
                await place.replica.check()
                async with self.changing:
                    newest = self.publisher.newest
                    if newest is not None:
                        await place.replica.load(newest, newest.version if self.version is None else self.version)
                    if self.paused:
                        await place.replica.pause()
                    place.ready.set()
                return
            except EngineFailure as error:
                reason = str(error)
                log.warning("replica %d did not start: %s", place.number, error)
        place.given_up = reason
        await place.replica.close()

    # ------------------------------------------------------------ all replicas

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Publish once, and have every replica read that; one that is not there reads it when it comes back."""
        async with self.changing:
            published = weights
            if not isinstance(weights, Published):
                published = await asyncio.to_thread(self.publisher.publish, weights, version)
            self.version = version
            await self.all(lambda replica: replica.load(published, version))

    async def forget(self) -> None:
        self.homes.clear()
        await self.all(lambda replica: replica.forget())

    async def pause(self) -> None:
        async with self.changing:
            self.paused = True
            await self.all(lambda replica: replica.pause())

    async def resume(self) -> None:
        async with self.changing:
            self.paused = False
            await self.all(lambda replica: replica.resume())

    async def all(self, act: Callable[[Replica], Awaitable[None]]) -> None:
        """Do something with every replica that is there. One that fails is started again if it is dead; otherwise the
        failure is everybody's."""
        ready = [(place, place.replica) for place in self.places if place.ready.is_set()]
        done: Sequence[BaseException | None]
        done = await asyncio.gather(*(act(replica) for _, replica in ready), return_exceptions=True)
        for (place, replica), error in zip(ready, done, strict=True):
            if isinstance(error, EngineFailure):
                await self.examine(place, replica)
                if place.replica is not replica or not place.ready.is_set():
                    continue
            if error is not None:
                raise error

    async def open(self) -> None:
        """Returns when every replica is ready."""
        await self.all(lambda replica: replica.open())
        self.watch()

    async def close(self) -> None:
        self.closed = True
        tasks = [*self.work, *([self.watching] if self.watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(place.replica.close() for place in self.places))
        for place in self.places:
            place.given_up = "it was closed"
        self.publisher.close()
