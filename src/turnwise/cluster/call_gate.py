"""The gate: how calls of rollout workers reach the engines of the run, in an order that no timing decides.

A deterministic engine steps only when nobody can bring another call. So from the moment a worker is sent something
until it says that it waits again, the gate tells such an engine that calls may come; and it lets nothing through before
all workers wait. Then calls go in by their places, as those of one process would (`turnwise.engines.places`). Where no
engine is deterministic, everything goes through at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from turnwise.engines.base import Engine
from turnwise.engines.places import Place

Act = Callable[[], object]


class CallGate:
    """Knows which workers may still bring calls, and holds what must go in order.

    Example:
        gate = CallGate([engine])
        gate.sent(worker)               # it has got an answer
        gate.enter(place, submit)       # it makes a call
        gate.waits(worker)              # it waits: submit() is called
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self.coming: list[set[asyncio.Future[Any]]] = [
            engine.coming  # type: ignore[attr-defined]
            for engine in engines
            if getattr(engine, "is_deterministic", False)
        ]
        self.awake: dict[Hashable, asyncio.Future[None]] = {}
        """Workers that have got something and have not said since that they wait."""
        self.held: list[tuple[Place, Act]] = []

    @property
    def is_ordered(self) -> bool:
        return bool(self.coming)

    def sent(self, worker: Hashable) -> None:
        """A worker gets something that it may answer with calls."""
        if self.is_ordered and worker not in self.awake:
            future = self.awake[worker] = asyncio.get_running_loop().create_future()
            for coming in self.coming:
                coming.add(future)

    def waits(self, worker: Hashable) -> None:
        """A worker waits for the run, or is gone."""
        future = self.awake.pop(worker, None)
        if future is None:
            return
        if not self.awake:
            self.open()
        for coming in self.coming:
            coming.discard(future)
        future.set_result(None)

    def enter(self, place: Place, act: Act) -> None:
        """Act in the order of places, once all workers wait."""
        if not self.awake:
            act()
        else:
            self.held.append((place, act))

    def open(self) -> None:
        held, self.held = self.held, []
        for _, act in sorted(held, key=lambda each: each[0]):
            act()
