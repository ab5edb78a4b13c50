"""Workers: where the heavy calls of engine and learner run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Worker = Callable[..., Awaitable[Any]]
"""(function, *arguments) -> an awaitable of its result."""
Workers = Callable[[str], Worker]
"""Makes the worker for a name, such as "engine" or "learner"."""


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in the event loop itself: nothing else runs meanwhile."""
    return function(*arguments)


def in_own_thread(name: str) -> Worker:
    """Makes all calls in one thread. Every thread has a memory arena and an OpenMP team, and a pool would grow one of
    each per worker."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)

    return run
