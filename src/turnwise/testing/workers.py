"""Workers for tests: heavy calls that take virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from turnwise.schedule.workers import Worker


def in_virtual_time(seconds: Callable[[], float]) -> Worker:
    """Makes calls in the event loop and returns their results that many seconds later by the loop's clock. Under a
    virtual clock sampling and learning then overlap as they do in threads, the same way every time."""

    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        await asyncio.sleep(seconds())
        return result

    return run
