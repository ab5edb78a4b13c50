"""Places for environments: nothing is opened without one, so that what is alive at once has a bound."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from turnwise.envs.base import Environment
from turnwise.rollout.failures import Failures

IN_PROCESS = 256
"""Environments alive at once, where each is an object: also the most threads and sockets, one for each."""
PER_CORE = 8
"""Environments alive at once for each core, where each is a process: most of them wait for the model."""


def cores() -> int:
    """Of those that the machine has, the ones that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usual_limit(kind: Any, num_cores: int | None = None) -> int:
    """How many environments of a class may be alive at once unless a recipe says so."""
    is_process = bool(getattr(kind, "costs_process", False))
    return PER_CORE * (num_cores or cores()) if is_process else IN_PROCESS


class Places:
    """Places that attempts take before they make an environment, and keep until it is closed. First come, first served.

    Whoever waits holds nothing that those with a place need: no deadline runs, no call of an engine is under way, and
    batched calls do not count it. With `whole`, these places are a part of others, which have to be free too.

    Example:
        places = Places(16)
        async with places.one():
            ...
    """

    def __init__(self, limit: int = IN_PROCESS, whole: Places | None = None) -> None:
        if limit < 1:
            raise ValueError(f"at least one environment has to be alive, got a limit of {limit}")
        self.limit = limit
        self.whole = whole
        self.loop: asyncio.AbstractEventLoop | None = None

    def half(self) -> Places:
        """Half of the places, for attempts that must not keep all others waiting."""
        return Places(max(1, self.limit // 2), whole=self)

    def one(self) -> Place:
        """A place for as long as an `async with` of it lasts."""
        return Place((self.semaphore(), *(self.whole.one().free if self.whole else ())))

    def semaphore(self) -> asyncio.Semaphore:
        """That of the running loop; whoever was in another one is gone with it."""
        loop = asyncio.get_running_loop()
        if loop is not self.loop:
            self.loop, self.free = loop, asyncio.Semaphore(self.limit)
        return self.free


class Place:
    """One of some places, from when it is entered until it is left."""

    def __init__(self, free: Sequence[asyncio.Semaphore]) -> None:
        self.free = free
        self.held: list[asyncio.Semaphore] = []

    async def __aenter__(self) -> None:
        try:
            for semaphore in self.free:
                await semaphore.acquire()
                self.held.append(semaphore)
        except BaseException:
            self.leave()
            raise

    async def __aexit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        while self.held:
            with suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                self.held.pop().release()


@dataclass(frozen=True, slots=True)
class Supply:
    """Fresh environments of a dataset: what makes one, how many may be alive at once, and how their attempts fail.

    Example:
        Supply(Maze, Places(64), failures)
    """

    make: Callable[[], Environment]
    places: Places = field(default_factory=Places)
    failures: Failures = field(default_factory=Failures)

    def __call__(self) -> Environment:
        return self.make()


def supplied(make: Callable[[], Environment]) -> Supply:
    """The same maker with a bound, the usual one where it has none."""
    return make if isinstance(make, Supply) else Supply(make, Places(usual_limit(make)))
