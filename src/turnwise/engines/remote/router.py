"""The router: one engine over several replicas. A replica that dies costs time and no call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from turnwise.engines.base import Completion, Engine, EngineFailure, Sampling, can_sleep, checked_prompt
from turnwise.tokens import Tokens
from turnwise.weights.published import Published
from turnwise.weights.stages import stage

log = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""Between two checks of a replica's health."""
ANSWER_SECONDS = 60.0
"""How long a replica may take to answer one."""
STARTS = 3
"""How often in a row a replica may fail to start before its slot is given up."""
LONGEST_WAIT = 60.0
"""Seconds between two tries to start a replica that is never given up; the first wait is that between two checks."""
MAX_SESSIONS = 1 << 16
"""Sessions whose replica is remembered."""


class ReplicaEngine(Engine, Protocol):
    """An engine whose health can be checked."""

    name: str
    """As messages call it."""

    async def check(self) -> None:
        """Returns when the engine answers; an EngineFailure says that it never will."""
        ...


class WeightStore(Protocol):
    """Where weights are put for replicas to read: a `Publisher`, or an `ObjectStore` on a cluster."""

    @property
    def newest(self) -> Any:
        """The weights that were published last, with their version; None before the first, and where they cannot be
        read again later."""
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
        self.waits_for_load = False
        """Whether it answers again, and gets calls after the next load."""
        self.has_started = False
        """Whether its replica has ever answered; a start may take any time."""
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
    one is started again, and gets calls once it has the present weights: at once where they can be read again, or with
    the next load.

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
        starts: int | None = STARTS,
    ) -> None:
        """`start` makes the replica with a number, which reads the newest weights that are published. `starts` is how
        often in a row one may fail to start before it is given up; None tries for ever, for replicas that somebody else
        starts. Closing the router closes the publisher."""
        self.start = start
        self.publisher = publisher
        self.check_seconds = check_seconds
        self.answer_seconds = answer_seconds
        self.starts = starts
        self.slots = [ReplicaSlot(number, start(number)) for number in range(replicas)]
        self.context = min(slot.replica.context for slot in self.slots)
        self.session_slots: dict[str, ReplicaSlot] = {}
        self.changing = asyncio.Lock()  # held while weights and pauses change, and while a replica comes back
        self.paused = self.closed = self.asleep = False
        self.version: int | None = None
        """Of the last load; None before the first."""
        self.restarts: set[asyncio.Task[None]] = set()
        self.health_checks: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """Seconds inside the model, summed over replicas, those that died included: with several it may exceed the time
        that passed."""
        return sum(slot.seconds for slot in self.slots)

    @property
    def sleeps(self) -> bool:
        return any(can_sleep(slot.replica) for slot in self.slots)

    def copies(self) -> dict[str, Engine]:
        """The replicas that get calls, by name: each has a copy of the weights."""
        return {slot.replica.name: slot.replica for slot in self.slots if slot.ready.is_set()}

    @property
    def num_starts(self) -> int:
        """Replicas so far, those that died included."""
        return sum(slot.num_starts for slot in self.slots)

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
            await self.check(replica)
        except EngineFailure as error:
            if slot.replica is replica and slot.ready.is_set():
                self.leave_out(slot, error)

    async def check(self, replica: ReplicaEngine) -> None:
        """Returns when a replica answers, an EngineFailure where it does not in time."""
        try:
            async with asyncio.timeout(self.answer_seconds):
                await replica.check()
        except TimeoutError:
            raise EngineFailure(f"it does not answer in {self.answer_seconds:g} s") from None

    async def while_alive(self, slot: ReplicaSlot, act: Callable[[ReplicaEngine], Awaitable[None]]) -> None:
        """Have a slot's replica do something; an EngineFailure where it stops answering meanwhile."""
        replica = slot.replica
        task = asyncio.ensure_future(act(replica))
        try:
            while not (await asyncio.wait({task}, timeout=self.check_seconds))[0]:
                if slot.has_started or slot.replica is not replica:
                    await self.check(replica)
            task.result()
        finally:
            task.cancel()
        slot.has_started = slot.has_started or slot.replica is replica

    def leave_out(self, slot: ReplicaSlot, reason: BaseException) -> None:
        """Give a slot no more calls, and start another replica in it."""
        if self.closed:
            return
        slot.ready.clear()
        slot.waits_for_load = slot.has_started = False
        log.warning("%s is left out and started again: %s", slot.replica.name, reason)
        task = asyncio.create_task(self.restart(slot), name=f"replica {slot.number} starts again")
        self.restarts.add(task)
        task.add_done_callback(self.restarts.discard)

    async def restart(self, slot: ReplicaSlot) -> None:
        """Start another replica in a slot, with the present weights."""
        reason, wait = "", self.check_seconds
        for tried in count(1):
            await slot.replica.close()
            try:
                slot.past_seconds, slot.replica = slot.seconds, self.start(slot.number)
                slot.num_starts += 1
                await slot.replica.check()
                slot.has_started = True
                async with self.changing:
                    await self.rejoin(slot)
                return
            except EngineFailure as error:
                slot.has_started = False
                level = logging.WARNING if str(error) != reason else logging.DEBUG  # it may go on for hours
                log.log(level, "%s did not start: %s", slot.replica.name, error)
                reason = str(error)
            if tried == self.starts:
                break
            if self.starts is None:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
        slot.given_up = reason
        await slot.replica.close()

    async def rejoin(self, slot: ReplicaSlot) -> None:
        """Give a replica that has started the present weights, and calls, while changes are locked out."""
        newest, replica = self.publisher.newest, slot.replica
        if newest is not None and not self.asleep:
            version = newest.version if self.version is None else self.version
            await self.while_alive(slot, lambda replica: replica.load(newest, version))
        elif self.asleep or self.version is not None:  # the learner has its memory, or nobody knows its weights
            slot.waits_for_load = True
            log.warning("%s answers again, and gets calls after the next load", replica.name)
            return
        await self.admit(slot)

    async def admit(self, slot: ReplicaSlot) -> None:
        """Give calls to a replica that has the present weights."""
        slot.waits_for_load = False
        if self.paused:
            await self.while_alive(slot, lambda replica: replica.pause())
        log.warning("%s is used again, with version %s", slot.replica.name, self.version)
        slot.ready.set()

    # ------------------------------------------------------------ all replicas

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Publish once, and have every replica read that; one that is starting reads it when it is ready. One that
        could not load has unknown weights: it is left out and started again, unless no other has loaded them."""
        async with self.changing:
            published = weights
            if not isinstance(weights, Published):
                published = await asyncio.to_thread(self.publisher.publish, weights, version)
            self.version, self.asleep = version, False
            slots = [slot for slot in self.slots if slot.ready.is_set() or slot.waits_for_load]
            with stage("swap"):
                failures = await self.each(slots, lambda replica: replica.load(published, version))
            if len(failures) == len(slots):
                await self.raise_of_living(failures)
            for slot in slots:
                if slot in failures:
                    self.leave_out(slot, failures[slot])
                elif slot.waits_for_load:
                    await self.admit(slot)

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

    async def sleep(self) -> None:
        """Have every replica give its memory away until the next load."""
        async with self.changing:
            self.asleep = True
            await self.all(put_to_sleep)

    async def each(
        self, slots: Sequence[ReplicaSlot], act: Callable[[ReplicaEngine], Awaitable[None]]
    ) -> dict[ReplicaSlot, EngineFailure]:
        """Do something with the replicas of slots at once: the failures of those that have not been replaced
        meanwhile."""
        replicas = [slot.replica for slot in slots]
        errors = await asyncio.gather(*(self.while_alive(slot, act) for slot in slots), return_exceptions=True)
        failures = {}
        for slot, replica, error in zip(slots, replicas, errors, strict=True):
            if error is not None and not isinstance(error, EngineFailure):
                raise error
            if error is not None and slot.replica is replica and (slot.ready.is_set() or slot.waits_for_load):
                failures[slot] = error
        return failures

    async def all(self, act: Callable[[ReplicaEngine], Awaitable[None]]) -> None:
        """Do something with every replica that is ready. A replica that fails because it is dead is started again; any
        other failure is raised."""
        failures = await self.each([slot for slot in self.slots if slot.ready.is_set()], act)
        await self.raise_of_living(failures)
        for slot, error in failures.items():
            self.leave_out(slot, error)

    async def raise_of_living(self, failures: Mapping[ReplicaSlot, EngineFailure]) -> None:
        """Raise the failure of a replica that answers: others would fail the same way."""
        for slot, error in failures.items():
            try:
                await self.check(slot.replica)
            except EngineFailure:
                continue
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


async def put_to_sleep(replica: ReplicaEngine) -> None:
    if can_sleep(replica):
        await replica.sleep()
