"""Coroutines that run side by side, and have all ended afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def all_of(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of coroutines that run concurrently. All of them have ended when this returns or raises, also when it
    is cancelled: an attempt may have an environment to close."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # a second cancellation would interrupt the closing of its environment
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
