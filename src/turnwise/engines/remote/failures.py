"""Errors of servers and of the network, as an engine tells them."""

from __future__ import annotations

import asyncio


def in_one_line(error: BaseException) -> str:
    """The text of an error, or of its cause: vLLM wraps some in empty ones."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def cancelled_from_outside() -> bool:
    """Whether somebody cancelled the running task, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
