"""Exceptions as text, because a traceback has to outlive the process, the thread or the batch that it came from."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

import turnwise

Error = TypeVar("Error", bound=BaseException)

LONGEST_TEXT = 1000
"""Characters of an error's own text that are kept."""
LONGEST_TRACEBACK = 8000
"""Characters of a traceback that are kept, from its end, where the error is."""
DEEPEST = 16
"""How many causes of an error are followed."""
CARRIED = "turnwise_raised"
"""The attribute of an exception that holds what was raised in another process, thread or batch."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception, where it came from and how.

    Example:
        Raised("ZeroDivisionError", "games/maze.py:41", "division by zero", "Traceback (most recent call last):\\n ...")
    """

    kind: str
    where: str
    """File and line: the innermost of the user's code, or of a library if none of the user's code was running."""
    text: str
    traceback: str

    @property
    def reason(self) -> str:
        """Equal for two exceptions that count as the same failure."""
        return f"{self.kind} at {self.where}" if self.where else self.kind

    @property
    def line(self) -> str:
        """The reason, then a colon and what it said."""
        return f"{self.reason}: {self.text}" if self.text else self.reason

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """The exception as text; if it only passes on another one, that one."""
        chain = list(behind(error))
        for each in chain:
            if isinstance(carried := vars(each).get(CARRIED), Raised):
                return carried
        origin = next((each for each in chain if place_of(each, users_only=True)), error)
        named = error if issubclass(type(error), TimeoutError) else origin  # a time-out is a cancellation inside
        return cls(type(named).__name__, place_of(origin), error_line(named, with_kind=False), traceback_of(error))

    def packed(self) -> list[str]:
        """As JSON."""
        return [self.kind, self.where, self.text, self.traceback]


def carrying(error: Error, raised: Raised) -> Error:
    """The error with what was raised elsewhere attached to it."""
    try:
        setattr(error, CARRIED, raised)
    except BaseException:  # an exception may refuse attributes, in code of its own
        return error
    return error


def behind(error: BaseException) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < DEEPEST:
        yield current
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def place_of(error: BaseException, users_only: bool = False) -> str:
    """File and line of the innermost frame of the user's code. Unless `users_only`, of the innermost library frame if
    there is none, or else of the innermost frame."""
    frames = list(frames_of(error.__traceback__))
    for kinds in (("user",),) if users_only else (("user",), ("library", "turnwise"), ("python",)):
        for name, line in reversed(frames):
            if owner_of(name) in kinds:
                return f"{shortened(name)}:{line}"
    return ""


def home_of(function: Callable[..., Any]) -> str:
    """File and line where a function is defined; empty if that is unknown."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return "" if code is None else f"{shortened(code.co_filename)}:{code.co_firstlineno}"


def frames_of(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


@cache
def owner_of(name: str) -> str:
    """Whose code a file is: user, turnwise, library or python."""
    path = os.path.abspath(name)
    if name.startswith("<"):  # frozen modules, and what dataclasses and others have generated
        return "python"
    if path.startswith(os.path.dirname(turnwise.__file__) + os.sep):
        return "turnwise"
    if {"site-packages", "dist-packages"} & set(path.split(os.sep)):
        return "library"
    folders = {sysconfig.get_path(part) for part in ("stdlib", "platstdlib")}
    return "python" if any(path.startswith(folder + os.sep) for folder in folders if folder) else "user"


def shortened(name: str) -> str:
    """The path relative to the current folder, if it is below that."""
    return name.removeprefix(os.getcwd() + os.sep)


def error_line(error: BaseException, with_kind: bool = True) -> str:
    """An error in one line that can be printed: its type, a colon and its text, or the text alone."""
    try:
        text = f"{type(error).__name__}: {error}" if with_kind else str(error)
    except BaseException:  # the text of an environment's error is code of the environment
        text = "an error that cannot be shown"
    return printable(" ".join(text[:LONGEST_TEXT].split()))


def traceback_of(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except BaseException:
        return ""
    return printable(text if len(text) <= LONGEST_TRACEBACK else f"...{text[-LONGEST_TRACEBACK:]}")


def printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def unpacked(parts: Any) -> Raised:
    """Inverse of `Raised.packed`, for input from an environment or another process; ValueError if it is malformed."""
    if len(parts) != len(Raised.__slots__) or not all(issubclass(type(part), str) for part in parts):
        raise ValueError("what was raised is told in four texts: kind, where, text and traceback")
    kind, where, text, trace = (printable(str.__str__(part)) for part in parts)
    kind, where, text = (" ".join(part[:LONGEST_TEXT].split()) for part in (kind, where, text))
    return Raised(kind, where, text, trace[-LONGEST_TRACEBACK:])
