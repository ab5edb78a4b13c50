"""What was raised, as text: a traceback has to outlive the process, the thread or the batch that it came from."""

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
"""Characters of a traceback that are kept: its end, which is where it broke."""
DEEPEST = 16
"""Errors behind an error that are looked at."""
CARRIED = "turnwise_raised"
"""The attribute of an exception that came over a border and brings with it what was raised on the other side."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception, where it came from and how.

    Example:
        Raised("ZeroDivisionError", "games/maze.py:41", "division by zero", "Traceback (most recent call last):\\n ...")
    """

    kind: str
    where: str
    """File and line: the innermost of the user's own, or of a library's where no code of the user's was under way."""
    text: str
    traceback: str

    @property
    def reason(self) -> str:
        """What makes two of them the same."""
        return f"{self.kind} at {self.where}" if self.where else self.kind

    @property
    def line(self) -> str:
        """The reason, then a colon and what it said."""
        return f"{self.reason}: {self.text}" if self.text else self.reason

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """What is told of an exception; of the one behind it where it only passes that on."""
        chain = list(behind(error))
        for each in chain:
            if isinstance(carried := vars(each).get(CARRIED), Raised):
                return carried
        meant = next((each for each in chain if place_of(each, users_only=True)), error)
        named = error if issubclass(type(error), TimeoutError) else meant  # a time-out is a cancellation inside
        return cls(type(named).__name__, place_of(meant), error_line(named, with_kind=False), traceback_of(error))

    def packed(self) -> list[str]:
        """As JSON has it."""
        return [self.kind, self.where, self.text, self.traceback]


def carrying(error: Error, raised: Raised) -> Error:
    """The error, which brings along what was raised elsewhere."""
    try:
        setattr(error, CARRIED, raised)
    except BaseException:  # an exception may refuse attributes, in code of its own
        return error
    return error


def behind(error: BaseException) -> Iterator[BaseException]:
    """An error, the one it was raised from, and so on."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen and len(seen) < DEEPEST:
        yield found
        seen.add(id(found))
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def place_of(error: BaseException, users_only: bool = False) -> str:
    """File and line of the innermost frame of the user's; of the innermost that is not Python's own where there is none
    and others will do."""
    frames = list(frames_of(error.__traceback__))
    for kinds in (("user",),) if users_only else (("user",), ("library", "turnwise"), ("python",)):
        for name, line in reversed(frames):
            if owner_of(name) in kinds:
                return f"{shortened(name)}:{line}"
    return ""


def home_of(function: Callable[..., Any]) -> str:
    """File and line that a function begins at; empty where it has none."""
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
    own = {sysconfig.get_path(part) for part in ("stdlib", "platstdlib")}
    return "python" if any(path.startswith(folder + os.sep) for folder in own if folder) else "user"


def shortened(name: str) -> str:
    """A path from where the run was started, where it is below that."""
    here = os.getcwd() + os.sep
    return name.removeprefix(here)


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
    """Inverse of `Raised.packed`, of what an environment or another process says; ValueError where it says none."""
    if len(parts) != len(Raised.__slots__) or not all(issubclass(type(part), str) for part in parts):
        raise ValueError("what was raised is told in four texts: kind, where, text and traceback")
    kind, where, text, trace = (printable(str.__str__(part)) for part in parts)
    kind, where, text = (" ".join(part[:LONGEST_TEXT].split()) for part in (kind, where, text))
    return Raised(kind, where, text, trace[-LONGEST_TRACEBACK:])
