"""The router: one engine over several replicas. A replica that dies costs time and no call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from turnwise.engines.base import Completion, Engine, EngineFailure, Sampling, checked_prompt
from turnwise.tokens import Tokens
from turnwise.weights.published import Published

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""Between two checks of a replica's health."""
ANSWER_SECONDS = 60.0
"""How long a replica may take to answer one."""
STARTS = 3
"""How often in a row a replica may fail to start before its slot is given up."""
MAX_SESSIONS = 1 << 16
"""Sessions whose replica is remembered."""


class ReplicaEngine(Engine, Protocol):
    """An engine whose health can be checked."""

    async def check(self) -> None:
        """Returns when the engine answers; an EngineFailure says that it never will."""
        ...


class WeightStore(Protocol):
    """Where weights are put for replicas to read: a `Publisher`, or an `ObjectStore` on a cluster."""

    @property
    def newest(self) -> Any:
        """The weights that were published last, with their version; None before the first."""
        ...

    def publish(self, weights: Mapping[str, Any], version: int) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class ReplicaSlot:
    """One replica, and after its death the next one with the same number."""

    def __init__(self, number: int, replica: ReplicaEngine) -> None:
        self.number = number
        self.replica = replica
        self.ready = asyncio.Event()
        self.ready.set()
        self.given_up = ""
        """Why no replica is started any more; empty while there is one or will be."""
        self.num_calls = 0
        """Calls under way."""
        self.num_served = 0
        """Calls answered, by all replicas of this slot."""
        self.num_starts = 1
        """Replicas of this slot so far."""
        self.past_seconds = 0.0
        """Seconds inside the model of the replicas that died."""

    @property
    def seconds(self) -> float:
        return self.past_seconds + self.replica.seconds


class Router:
    """`Engine` over replicas. A session stays with the replica that has its prefixes; a new one goes to the replica
    with the fewest calls under way. A call whose replica dies is made again by another, with the same seed; the dead
    one is started again, and gets calls once it has the present weights.

    Example:
        start = lambda number: ProcessEngine(make, skeleton, publisher, context=4096, name=f"replica {number}")
        engine = Router(start, 2, publisher)
    """

    shares_weights = False

    def __init__(
        self,
        start: Callable[[int], ReplicaEngine],
        replicas: int,
        publisher: WeightStore,
        *,
        check_seconds: float = CHECK_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """`start` makes the replica with a number, which reads the newest weights that are published. Closing the
        router closes the publisher."""
        self.start = start
        self.publisher = publisher
        self.check_seconds = check_seconds
        self.answer_seconds = answer_seconds
        self.slots = [ReplicaSlot(number, start(number)) for number in range(replicas)]
        self.context = min(slot.replica.context for slot in self.slots)
        self.session_slots: dict[str, ReplicaSlot] = {}
        self.changing = asyncio.Lock()  # held while weights and pauses change, and while a replica comes back
        self.paused = self.closed = False
        self.version: int | None = None
        """Of the last load; None before the first."""
        self.restarts: set[asyncio.Task[None]] = set()
        self.health_checks: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """Seconds inside the model, summed over replicas, those that died included: with several it may exceed the time
        that passed."""
        return sum(slot.seconds for slot in self.slots)

    # ------------------------------------------------------------ calls

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        prompt = checked_prompt(prompt, seed, context=self.context)
        self.start_health_checks()
        tries = 2 * len(self.slots) + 1
        while True:
            slot = await self.slot_for(session)
            replica = slot.replica
            slot.num_calls += 1
            try:
                completion = await replica.generate(prompt, sampling, session=session, seed=seed)
            except EngineFailure as error:
                tries -= 1
                self.session_slots.pop(session, None)
                if self.closed or not tries:
                    raise
                log.warning("a call is made again elsewhere: %s", error)
                await self.check_health(slot, replica)
            else:
                slot.num_served += 1
                return completion
            finally:
                slot.num_calls -= 1

    async def slot_for(self, session: str) -> ReplicaSlot:
        """The slot for the calls of a session: the one of its calls before, or the one with the fewest calls. Waits
        while no replica is ready."""
        while True:
            if self.closed:
                raise EngineFailure("the engine was closed")
            slot = self.session_slots.get(session)
            if slot is not None and slot.ready.is_set():
                return slot
            ready = [slot for slot in self.slots if slot.ready.is_set()]
            if ready:
                slot = self.session_slots[session] = min(ready, key=lambda slot: slot.num_calls)
                if len(self.session_slots) > MAX_SESSIONS:
                    del self.session_slots[next(iter(self.session_slots))]
                return slot
            starting = [slot for slot in self.slots if not slot.given_up]
            if not starting:
                raise EngineFailure(f"no replica is left: {self.slots[0].given_up}")
            waits = [asyncio.ensure_future(slot.ready.wait()) for slot in starting]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=self.check_seconds)
            finally:
                for wait in waits:
                    wait.cancel()

    async def abort(self, session: str) -> None:
        slot = self.session_slots.get(session)
        if slot is not None and slot.ready.is_set():
            with suppress(EngineFailure):  # its call is made again, and nobody waits for it any more
                await slot.replica.abort(session)

    # ------------------------------------------------------------ health

    def start_health_checks(self) -> None:
        if self.health_checks is None:
            self.health_checks = asyncio.create_task(self.check_for_ever(), name="router")

    async def check_for_ever(self) -> None:
        """Check replicas that nobody calls, and those that never answer. The start itself has no time limit."""
        await self.all(lambda replica: replica.check())
        while True:
            await asyncio.sleep(self.check_seconds)
            ready = [slot for slot in self.slots if slot.ready.is_set()]
            await asyncio.gather(*(self.check_health(slot, slot.replica) for slot in ready))

    async def check_health(self, slot: ReplicaSlot, replica: ReplicaEngine) -> None:
        """Replace a replica that is dead or does not answer."""
        try:
            async with asyncio.timeout(self.answer_seconds):
                await replica.check()
        except (EngineFailure, TimeoutError) as error:
            if slot.replica is replica and slot.ready.is_set() and not self.closed:
                slot.ready.clear()
                log.warning("replica %d is started again: %s", slot.number, error or "it does not answer")
                task = asyncio.create_task(self.restart(slot), name=f"replica {slot.number} starts again")
                self.restarts.add(task)
                task.add_done_callback(self.restarts.discard)

    async def restart(self, slot: ReplicaSlot) -> None:
        """Start another replica in a slot, with the present weights."""
        reason = ""
        for _ in range(STARTS):
            await slot.replica.close()
            try:
                slot.past_seconds, slot.replica = slot.seconds, self.start(slot.number)
                slot.num_starts += 1
                await slot.replica.check()
                async with self.changing:
                    newest = self.publisher.newest
                    if newest is not None:
                        await slot.replica.load(newest, newest.version if self.version is None else self.version)
                    if self.paused:
                        await slot.replica.pause()
                    slot.ready.set()
                return
            except EngineFailure as error:
                reason = str(error)
                log.warning("replica %d did not start: %s", slot.number, error)
        slot.given_up = reason
        await slot.replica.close()

    # ------------------------------------------------------------ all replicas

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Publish once, and have every replica read that; one that is starting reads it when it is ready."""
        async with self.changing:
            published = weights
            if not isinstance(weights, Published):
                published = await asyncio.to_thread(self.publisher.publish, weights, version)
            self.version = version
            await self.all(lambda replica: replica.load(published, version))

    async def forget(self) -> None:
        self.session_slots.clear()
        await self.all(lambda replica: replica.forget())

    async def pause(self) -> None:
        async with self.changing:
            self.paused = True
            await self.all(lambda replica: replica.pause())

    async def resume(self) -> None:
        async with self.changing:
            self.paused = False
            await self.all(lambda replica: replica.resume())

    async def all(self, act: Callable[[ReplicaEngine], Awaitable[None]]) -> None:
        """Do something with every replica that is ready. A replica that fails because it is dead is started again; any
        other failure is raised."""
        ready = [(slot, slot.replica) for slot in self.slots if slot.ready.is_set()]
        errors: Sequence[BaseException | None]
        errors = await asyncio.gather(*(act(replica) for _, replica in ready), return_exceptions=True)
        for (slot, replica), error in zip(ready, errors, strict=True):
            if isinstance(error, EngineFailure):
                await self.check_health(slot, replica)
                if slot.replica is not replica or not slot.ready.is_set():
                    continue
            if error is not None:
                raise error

    async def open(self) -> None:
        """Returns when every replica is ready."""
        await self.all(lambda replica: replica.open())
        self.start_health_checks()

    async def close(self) -> None:
        self.closed = True
        tasks = [*self.restarts, *([self.health_checks] if self.health_checks else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(slot.replica.close() for slot in self.slots))
        for slot in self.slots:
            slot.given_up = "it was closed"
        self.publisher.close()
