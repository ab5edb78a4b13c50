"""The stream of groups: attempts run ahead of the learner, as far as lag slots allow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from turnwise.schedule.fairness import Fairness
from turnwise.schedule.order import ORDERS, Line, Order, Started
from turnwise.schedule.tasks import Draw
from turnwise.types import Group, turns_of

log = logging.getLogger(__name__)

MakeGroup = Callable[[Draw], Awaitable[Group]]


class LagSlots:
    """Permits to start groups. A group holds a slot from its start until weights trained on it are live.

    With (max_lag + 1) * groups_per_step slots or fewer, and groups taken in the order they started, or so that none is
    late, no group can be trained on more than max_lag versions after its first token (docs/decisions/0036).
    """

    def __init__(self, count: int) -> None:
        self.free = asyncio.Semaphore(count)

    async def acquire(self) -> None:
        await self.free.acquire()

    def release(self, count: int = 1) -> None:
        for _ in range(count):
            self.free.release()


@dataclass(slots=True)
class Used:
    """Which draws of a run were used (trained on or dropped): all before `base`, and those in `ahead`."""

    base: int = 0
    ahead: list[int] = field(default_factory=list)

    def add(self, number: int) -> None:
        self.ahead = sorted({*self.ahead, number})
        while self.ahead and self.ahead[0] == self.base:
            self.ahead.pop(0)
            self.base += 1

    def copy(self) -> Used:
        return Used(self.base, list(self.ahead))


class GroupStream:
    """Groups in the order they started, or in another one of ORDERS. At most `wanted` groups are started, plus one for
    each that was dropped.

    Groups that an earlier part of the run had `finished`, by the number of their draw, are not sampled again. `version`
    is that of the live weights; whoever loads others says so (`advance`).

    Example:
        async with GroupStream(tasks.draw, make_group, LagSlots(32), wanted=320) as stream:
            group = await stream.next()
    """

    def __init__(
        self,
        draw: Callable[[], Draw],
        make_group: MakeGroup,
        slots: LagSlots,
        wanted: int,
        *,
        order: Order = "started",
        groups_per_step: int = 1,
        max_lag: int = 0,
        version: int = 0,
        used: Used | None = None,
        finished: Mapping[int, Group] = MappingProxyType({}),
        patience: float = 60.0,
    ) -> None:
        self.draw = draw
        self.make_group = make_group
        self.slots = slots
        self.wanted = asyncio.Semaphore(wanted)
        self.choose = ORDERS[order]
        self.groups_per_step, self.max_lag = groups_per_step, max_lag
        self.version = version
        self.used = used.copy() if used else Used()
        self.kept = dict(finished)
        self.patience = patience
        self.started: list[Started] = []
        self.ready: list[Started] = []
        """In the order they finished."""
        self.change = asyncio.Event()
        self.error: Exception | None = None
        self.fairness = Fairness()

    async def __aenter__(self) -> GroupStream:
        self.producer = asyncio.create_task(self.produce(), name="group producer")
        return self

    async def __aexit__(self, *error: object) -> None:
        """Attempts in flight are cancelled and their environments closed."""
        tasks = [self.producer, *(entry.task for entry in self.started)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def produce(self) -> None:
        """Start groups while there are slots. `next` raises an error that occurs in drawing tasks."""
        try:
            while True:
                await self.wanted.acquire()
                await self.slots.acquire()
                draw = self.draw()
                while draw.number in self.used.ahead:
                    draw = self.draw()
                self.start(draw)
        except Exception as error:
            self.error = error
            self.change.set()

    def start(self, draw: Draw) -> None:
        version = oldest_version(self.kept.get(draw.number), self.version)
        task = asyncio.create_task(self.make(draw), name=f"group {draw.number}: {draw.task.id}")
        entry = Started(draw, task, version)
        self.started.append(entry)
        task.add_done_callback(lambda _: self.finish(entry))
        self.change.set()

    async def make(self, draw: Draw) -> Group:
        kept = self.kept.pop(draw.number, None)
        return kept if kept is not None else await self.make_group(draw)

    def finish(self, entry: Started) -> None:
        self.ready.append(entry)
        if not entry.task.cancelled() and entry.task.exception() is None:
            self.fairness.sampled(entry.task.result())
        self.change.set()

    def advance(self, version: int) -> None:
        """From now on, tokens are sampled by the weights of this version."""
        self.version = version

    async def next(self, left: int = 1) -> Group:
        """The next group of a step that still needs `left` of them, this one included."""
        waited = 0.0
        while (entry := self.choose(self.line(left))) is None:
            if self.error is not None and not self.started:
                raise self.error
            self.change.clear()
            try:
                async with asyncio.timeout(self.patience):
                    await self.change.wait()
            except TimeoutError:
                waited += self.patience
                log.warning("waiting for groups since %.0f s; %s", waited, self.describe())
        self.started.remove(entry)
        self.ready.remove(entry)
        self.used.add(entry.draw.number)
        return entry.task.result()

    def line(self, left: int) -> Line:
        return Line(self.started, self.ready, self.version, left, self.groups_per_step, self.max_lag)

    def describe(self) -> str:
        """A phrase for logs: which groups are still running."""
        running = [entry.task.get_name() for entry in self.started if not entry.task.done()]
        shown = ", ".join(running[:3]) + (", ..." if len(running) > 3 else "")
        return f"{len(running)} of {len(self.started)} groups are still being made: {shown or 'none'}"

    def waiting(self) -> dict[int, Group]:
        """Groups that are finished and not taken yet, by the number of their draw."""
        finished = [entry for entry in self.ready if not entry.task.cancelled() and entry.task.exception() is None]
        return {entry.draw.number: entry.task.result() for entry in finished} | self.kept

    def replace_dropped(self) -> None:
        """Release the slot of a group that will not be trained on, and start another group instead."""
        self.slots.release()
        self.wanted.release()


def oldest_version(kept: Group | None, live: int) -> int:
    """The version of the oldest token of a group that was kept; `live` for one that is sampled from now on."""
    tokens = [turn.versions for turn in turns_of([kept])] if kept is not None else []
    return min((int(versions.min(initial=live)) for versions in tokens), default=live)
