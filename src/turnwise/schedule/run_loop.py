"""The event loop of a run: environments cannot stop it, and its clock stands still while something holds it up."""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
from typing import Any

from turnwise.rollout.blame import blamed, stack_of

COUNTED = 0.05
"""Seconds of one turn of the loop that its clock counts."""
BEAT = 0.05
"""Seconds after which the loop turns although nothing happens. A wait that took much longer was none: another thread
had the interpreter, or the machine stood still."""


class Stopwatch(selectors.DefaultSelector):
    """Measures the turns of an event loop: how long it waits, and how long it is held up."""

    def __init__(self) -> None:
        super().__init__()
        self.turned_at = self.now = time.monotonic()
        """When the loop last began a turn, on the clock of the machine and on its own."""
        self.longest_stall = 0.0

    def time(self) -> float:
        return self.now + min(time.monotonic() - self.turned_at, COUNTED)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began = time.monotonic()
        asked = BEAT if timeout is None else min(max(timeout, 0.0), BEAT)
        ready = super().select(asked)
        ended = time.monotonic()
        held, waited = began - self.turned_at, ended - began
        self.now += min(held, COUNTED) + min(waited, asked + COUNTED)
        self.longest_stall = max(self.longest_stall, held, waited - asked)
        self.turned_at = ended
        return ready


class RunLoop(asyncio.SelectorEventLoop):
    """An event loop that environments cannot stop, with a clock that stands still while something holds the loop up.

    All deadlines are set by that clock. So an attempt whose answer is there is not timed out because a checkpoint, a
    large reply or another attempt kept the loop from looking at it.

    Example:
        asyncio.Runner(loop_factory=RunLoop).run(work())
    """

    def __init__(self, stopwatch: Stopwatch | None = None) -> None:
        self.stopwatch = stopwatch or Stopwatch()
        super().__init__(self.stopwatch)

    def time(self) -> float:
        return self.stopwatch.time()

    def take_longest_stall(self) -> float:
        """Seconds of the longest time that the loop was held up since the last question."""
        longest, self.stopwatch.longest_stall = self.stopwatch.longest_stall, 0.0
        return longest

    def stop(self) -> None:
        stack = stack_of(threading.get_ident())
        if (culprit := blamed(stack[stack.index(sys._getframe(1)) :])) is not None:
            raise RuntimeError(f"an environment may not stop the event loop of the run ({culprit})")
        super().stop()

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        """Do not wait for threads that never return; the end of the process waits for the others."""
        if (executor := getattr(self, "_default_executor", None)) is not None:
            executor.shutdown(wait=False, cancel_futures=True)


def stall_metrics() -> dict[str, float]:
    """The longest stall since the last question, where the running loop measures it."""
    loop = asyncio.get_running_loop()
    return {"seconds/longest_stall": loop.take_longest_stall()} if isinstance(loop, RunLoop) else {}
