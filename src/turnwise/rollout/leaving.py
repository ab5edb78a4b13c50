"""Tasks that do not end when they are cancelled, and how to go on without them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from turnwise.rollout.blame import blamed_task

log = logging.getLogger(__name__)

LEFT: list[asyncio.Task[Any]] = []
"""Tasks that nobody waits for any more. They are kept: a forgotten coroutine is closed by an error raised in it, which
one that catches everything would catch too."""


def leave_behind(task: asyncio.Task[Any]) -> None:
    """Go on without a task that was cancelled and has not ended, and name it. The end of the event loop does not wait
    for it either, as `asyncio.run` would, for good."""
    LEFT.append(task)
    asyncio._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    log.warning(
        "%s does not end when it is cancelled, at %s; it is left behind, and may go on. Let CancelledError through",
        task.get_name(),
        blamed_task(task),
    )


async def end_all(seconds: float) -> None:
    """Cancel every other task of the loop, wait for them for a while, and go on without those that do not end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, stubborn = await asyncio.wait(tasks, timeout=seconds)
        for task in stubborn:
            leave_behind(task)
