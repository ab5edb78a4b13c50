"""A clock of CPU seconds for real runs: it jumps over waiting, and other work on the machine is left out.

Agent loop, engine and learner have a core each where they overlap.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from turnwise.schedule.workers import Worker
from turnwise.testing.clock import VirtualLoop


class CpuLoop(VirtualLoop):
    """An event loop whose clock counts the CPU seconds of its thread, without those of workers, and jumps over
    waiting."""

    def __init__(self) -> None:
        self.began, self.elsewhere = time.thread_time(), 0.0
        super().__init__()

    @property
    def own(self) -> float:
        """CPU seconds of the loop itself."""
        return time.thread_time() - self.began - self.elsewhere

    def time(self) -> float:
        return self.jump.now + self.own


def loop_here() -> CpuLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CpuLoop)
    return loop


class CpuWorkers:
    """Makes workers whose calls take as many seconds by the loop's clock as CPU seconds.

    Example:
        run_parts(recipe, environments, source, evaluations, workers=CpuWorkers().worker)
    """

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        """CPU seconds by the name of a worker."""

    def worker(self, name: str) -> Worker:
        async def run(function: Callable[..., Any], *arguments: Any) -> Any:
            began = time.thread_time()
            result = function(*arguments)
            spent = time.thread_time() - began
            loop_here().elsewhere += spent
            self.spent[name] += spent
            await asyncio.sleep(spent)
            return result

        return run
