"""Whose code the event loop is running, read from a stack."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, starmap, takewhile
from operator import methodcaller
from types import CodeType, FrameType
from typing import Any, TypeVar

from turnwise import __file__ as OWN
from turnwise.rollout.scene import Attempt

Function = TypeVar("Function", bound=Callable[..., Any])

OURS = os.path.realpath(os.path.dirname(OWN)) + os.sep
LIBRARIES = tuple(
    os.path.realpath(sysconfig.get_paths()[key]) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""Folders of Python and of installed packages."""
BORDERS: set[CodeType] = set()
ROOT = asyncio.events.Handle._run.__code__
"""The frame in which the event loop runs a callback; frames outside of it have called the loop."""


def border(function: Function) -> Function:
    """Mark a function of ours that does nothing but call environment code."""
    BORDERS.add(function.__code__)
    return function


@dataclass(frozen=True, slots=True)
class Blamed:
    """Environment code that is running.

    Example:
        Blamed(frame, "train/shop/t-3/0/2/0", "shop.py:41 in step")
    """

    frame: FrameType
    """Of the outermost call into environment code: the same frame until that call returns."""
    who: str
    """The attempt, or the task of the event loop."""
    where: str

    def __str__(self) -> str:
        return f"{self.who}, at {self.where}"


def blamed(stack: list[FrameType]) -> Blamed | None:
    """The environment code on a stack that the event loop has called; None if there is none."""
    frames = until_root(stack)
    inside = [frames[:index] for index, frame in enumerate(frames) if frame.f_code in BORDERS]
    # Without a border it is a task or a callback that a user's code started, unless the innermost code is ours.
    foreign = inside[0] if inside else list(takewhile(lambda frame: not is_ours(frame), frames))
    if not inside:
        while foreign and not is_foreign(foreign[-1]):
            foreign.pop()
    return Blamed(foreign[-1], who_of(frames), where_of(foreign)) if foreign else None


def blamed_task(task: asyncio.Task[Any]) -> str:
    """Where the code of a suspended task waits."""
    frames: list[FrameType] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        if (frame := getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)) is not None:
            frames.append(frame)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return where_of(frames[::-1]) if frames else "nowhere"


def until_root(stack: list[FrameType]) -> list[FrameType]:
    """The frames from the innermost one to where the event loop called it; none if no loop did."""
    root = next((index for index, frame in enumerate(stack) if frame.f_code is ROOT), 0)
    return stack[:root]


def is_ours(frame: FrameType) -> bool:
    return os.path.realpath(frame.f_code.co_filename).startswith(OURS)


def is_foreign(frame: FrameType) -> bool:
    """Whether a user wrote it."""
    file = frame.f_code.co_filename
    return not file.startswith("<") and not os.path.realpath(file).startswith((OURS, *LIBRARIES))


def who_of(frames: Sequence[FrameType]) -> str:
    """The attempt, batched call or task that a stack belongs to."""
    for frame in frames:
        values = [] if is_foreign(frame) else list(frame.f_locals.values())
        if attempt := next((value for value in values if type(value) is Attempt), None):
            return attempt.session
    names = [frame.f_locals["self"].name for frame in frames if frame.f_code.co_qualname == "MicroBatcher.serve"]
    return str(names[0]) if names else "a task of an environment"


def where_of(frames: Sequence[FrameType]) -> str:
    """The innermost line that a user wrote, or else the innermost line."""
    frame = next((frame for frame in frames if is_foreign(frame)), frames[0])
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def stack_of(thread: int) -> list[FrameType]:
    """The frames of a thread, innermost first; none where there is no such thread.

    C code reads them all, without giving up the interpreter's lock. Between two lines of Python the thread may go on,
    and in Python 3.11 `f_back` of a frame that it has left may crash the process.
    """
    innermost = map(methodcaller("get", thread), starmap(sys._current_frames, [()]))
    frames: list[Any] = []
    with suppress(AttributeError):  # beyond the outermost frame is None, which has no f_back
        frames.extend(accumulate(chain(innermost, repeat("f_back")), getattr))
    return [frame for frame in frames if frame is not None]
