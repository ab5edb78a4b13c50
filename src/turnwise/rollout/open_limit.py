"""How many environments may be open at once: an attempt gets a permit before it makes one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from turnwise.envs.base import Environment
from turnwise.envs.capabilities import costs_process
from turnwise.rollout.failures import Failures

IN_PROCESS = 256
"""Environments open at once if each is an object. Each may use a thread and a socket, so this bounds those too."""
PER_CORE = 8
"""Environments open at once per core if each is a process: most of them wait for the model."""


def cores() -> int:
    """The cores of the machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_open_limit(kind: Any, num_cores: int | None = None) -> int:
    """How many environments of a class may be open at once, unless a recipe says otherwise."""
    return PER_CORE * (num_cores or cores()) if costs_process(kind) else IN_PROCESS


class OpenLimit:
    """Permits for open environments. An attempt gets one before it makes its environment and returns it when that is
    closed, first come, first served.

    An attempt that waits for a permit holds nothing that the running ones need: no deadline runs, no engine call is
    under way, and batched calls do not wait for it. With `whole`, these permits are a part of those of another limit,
    and a permit of that one is needed too.

    Example:
        limit = OpenLimit(16)
        async with limit.permit():
            ...
    """

    def __init__(self, limit: int = IN_PROCESS, whole: OpenLimit | None = None) -> None:
        if limit < 1:
            raise ValueError(f"at least one environment has to be alive, got a limit of {limit}")
        self.limit = limit
        self.whole = whole
        self.loop: asyncio.AbstractEventLoop | None = None

    def half(self) -> OpenLimit:
        """Half of the permits, for attempts that must not make all others wait."""
        return OpenLimit(max(1, self.limit // 2), whole=self)

    def permit(self) -> OpenPermit:
        """A permit for the duration of an `async with`."""
        return OpenPermit((self.semaphore(), *(self.whole.permit().semaphores if self.whole else ())))

    def semaphore(self) -> asyncio.Semaphore:
        """The semaphore of the running loop; whoever waited in another loop is gone with it."""
        loop = asyncio.get_running_loop()
        if loop is not self.loop:
            self.loop, self.free = loop, asyncio.Semaphore(self.limit)
        return self.free


class OpenPermit:
    """A permit for one open environment, held from entering to leaving."""

    def __init__(self, semaphores: Sequence[asyncio.Semaphore]) -> None:
        self.semaphores = semaphores
        self.held: list[asyncio.Semaphore] = []

    async def __aenter__(self) -> None:
        try:
            for semaphore in self.semaphores:
                await semaphore.acquire()
                self.held.append(semaphore)
        except BaseException:
            self.release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        while self.held:
            with suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                self.held.pop().release()


@dataclass(frozen=True, slots=True)
class EnvironmentMaker:
    """Makes new environments of a dataset, limits how many are open at once, and counts how their attempts fail.

    Example:
        EnvironmentMaker(Maze, OpenLimit(64), failures)
    """

    make: Callable[[], Environment]
    open_limit: OpenLimit = field(default_factory=OpenLimit)
    failures: Failures = field(default_factory=Failures)

    def __call__(self) -> Environment:
        return self.make()


def with_open_limit(make: Callable[[], Environment]) -> EnvironmentMaker:
    """The maker itself if it has a limit, otherwise one with the default limit."""
    if isinstance(make, EnvironmentMaker):
        return make
    return EnvironmentMaker(make, OpenLimit(default_open_limit(make)))
