"""Tasks that do not end when they are cancelled, and how the run goes on without them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from turnwise.rollout.blame import blamed_task

log = logging.getLogger(__name__)

LEFT: list[asyncio.Task[Any]] = []
"""Tasks that nobody waits for any more. They are kept alive: garbage collection would raise GeneratorExit in the
coroutine, and one that catches everything would catch that too."""


def leave_behind(task: asyncio.Task[Any]) -> None:
    """Go on without a task that was cancelled and has not ended, and name it. The event loop does not wait for it at
    its end either; `asyncio.run` would wait for ever."""
    LEFT.append(task)
    asyncio._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    log.warning(
        "%s does not end when it is cancelled, at %s; it is left behind, and may go on. Let CancelledError through",
        task.get_name(),
        blamed_task(task),
    )


async def end_all(seconds: float) -> None:
    """Cancel all other tasks of the loop, wait that long for them, and leave behind those that do not end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, stubborn = await asyncio.wait(tasks, timeout=seconds)
        for task in stubborn:
            leave_behind(task)
