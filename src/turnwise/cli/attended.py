"""Work that a person may stop with Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turnwise.runs.screen import Screen

Result = TypeVar("Result")


def attended(work: Callable[[asyncio.Event], Coroutine[Any, Any, Result]], screen: Screen, recipe: Any) -> Result:
    """The result of work that leaves nothing behind when it is stopped; CancelledError where it is."""
    from turnwise.schedule.watchdog import Watchdog

    seconds = recipe.rollout.limits.blocked_seconds
    return Watchdog(say=screen.say, blocked_seconds=seconds, farewell="nothing was written").run(work)
