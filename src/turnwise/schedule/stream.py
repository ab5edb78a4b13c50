"""The stream of groups: attempts made ahead of the learner, as far as lag slots allow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from turnwise.schedule.tasks import Draw
from turnwise.types import Group

Practise = Callable[[Draw], Awaitable[Group]]


class Slots:
    """Permission to start groups. A group holds a slot from its start until weights trained on it are live.

    With (max_lag + 1) * groups_per_step slots and groups taken in the order they started, no group can be trained on
    more than max_lag versions after its first token.
    """

    def __init__(self, count: int) -> None:
        self.free = asyncio.Semaphore(count)

    async def acquire(self) -> None:
        await self.free.acquire()

    def release(self, count: int = 1) -> None:
        for _ in range(count):
            self.free.release()


class GroupStream:
    """Groups in the order they started. `wanted` bounds how many are started beyond those dropped."""

    def __init__(self, draw: Callable[[], Draw], practise: Practise, slots: Slots, wanted: int) -> None:
        self.draw = draw
        self.practise = practise
        self.slots = slots
        self.wanted = asyncio.Semaphore(wanted)
        self.started: deque[asyncio.Task[Group]] = deque()
        self.arrival = asyncio.Event()
        self.error: Exception | None = None

    async def produce(self) -> None:
        """Start groups while there are slots; an error in drawing tasks reaches whoever takes."""
        try:
            while True:
                await self.wanted.acquire()
                await self.slots.acquire()
                draw = self.draw()
                self.started.append(asyncio.create_task(self.make(draw), name=f"group {draw.number}: {draw.task.id}"))
                self.arrival.set()
        except Exception as error:
            self.error = error
            self.arrival.set()

    async def make(self, draw: Draw) -> Group:
        return await self.practise(draw)

    async def next(self) -> Group:
        """The group that started first among those not taken yet."""
        while not self.started:
            if self.error is not None:
                raise self.error
            self.arrival.clear()
            await self.arrival.wait()
        group = await asyncio.shield(self.started[0])
        self.started.popleft()
        return group

    def replace_dropped(self) -> None:
        """Give back the slot of a group that will not be trained on, and ask for another in its place."""
        self.slots.release()
        self.wanted.release()


@asynccontextmanager
async def stream_groups(
    draw: Callable[[], Draw], practise: Practise, slots: Slots, wanted: int
) -> AsyncIterator[GroupStream]:
    """A running stream; on leaving, attempts in flight are cancelled and their environments closed."""
    stream = GroupStream(draw, practise, slots, wanted)
    producer = asyncio.create_task(stream.produce(), name="group producer")
    try:
        yield stream
    finally:
        producer.cancel()
        for task in stream.started:
            task.cancel()
        await asyncio.gather(producer, *stream.started, return_exceptions=True)
