"""A virtual clock: an event loop whose time jumps to the next timer, so that hours of waiting take no time at all.

Nothing of the outside world is waited for: what sleeps or times out must do so by the loop's own clock, as
`asyncio.sleep`, `timeout` and `wait_for` do. Threads and sockets belong to the wall clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
JITTER = 1e-6
"""Seconds by which a seeded clock moves timers, to put those that fall together into an order of its own."""


class Deadlock(RuntimeError):
    """Nothing can run, nothing is timed, and so nothing will ever happen."""


class Jump(selectors.SelectSelector):
    """Moves the time on where a selector would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0) if timeout != 0 else []
        if not ready and timeout is None:
            raise Deadlock(f"no task can run and no timer is set; waiting: {', '.join(waiting()) or 'nobody'}")
        if not ready and timeout:
            self.now += timeout
        return ready


def waiting() -> list[str]:
    """Names of the unfinished tasks of the running loop."""
    return sorted(task.get_name() for task in asyncio.all_tasks())


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock. Timers that fall together go off in an order that is the same each time; a
    seed gives them another one."""

    def __init__(self, seed: int | None = None) -> None:
        self.jump = Jump()
        self.random = None if seed is None else Random(seed)
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        later = when if self.random is None else when + JITTER * self.random.random()
        return super().call_at(later, callback, *args, context=context)


def run(work: Coroutine[Any, Any, Result], seed: int | None = None) -> Result:
    """The result of a coroutine under a virtual clock that starts at 0; raises Deadlock where it can never end.

    Example:
        run(asyncio.sleep(3600, "an hour later"))
    """
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(work)
