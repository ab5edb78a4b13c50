"""Places: an order of model calls that does not depend on timing or on which process makes them.

Float results depend on what shares a pass, and in which order. So where a run has to be a function of its seed, an
engine takes the calls of a step in the order of their callers' places: those that it answered before, in the order of
those answers, then new ones, in the order of their groups and attempts.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

Place = tuple[int, ...]

UNKNOWN: Place = (2,)
"""Behind all others, in the order of arrival."""
PLACE: ContextVar[Place] = ContextVar("place", default=UNKNOWN)
"""The place of the running task's next call. Whoever starts an attempt sets it, and so does every answer."""

MOST_ROUNDS = 64
"""Rounds of the event loop without a new call after which nobody waits for code that spins."""


def place_of_new(group: int, attempt: int) -> Place:
    """The place of an attempt that has made no call yet: the `attempt`-th of the `group`-th group of the run."""
    return 1, group, attempt


def place_after(answer: int) -> Place:
    """The place of a caller that got the `answer`-th answer of the engine."""
    return 0, answer


def is_idle() -> bool:
    """Whether no other callback of the running loop can run now. A loop that does not say so counts as idle."""
    return not getattr(asyncio.get_running_loop(), "_ready", None)
