"""Workers: where the heavy calls of a run are made, those of the engine and of the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Worker = Callable[..., Awaitable[Any]]
"""(function, *arguments) -> its result, to be awaited."""
Workers = Callable[[str], Worker]
"""A worker by what it is called."""


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in the event loop itself: nothing else runs meanwhile."""
    return function(*arguments)


def in_own_thread(name: str) -> Worker:
    """Calls in one thread that is always the same: a thread has its own memory arena and its own OpenMP team, and a
    pool would grow one of each per worker."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)

    return run
