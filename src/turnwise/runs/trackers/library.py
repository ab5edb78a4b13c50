"""The border to the libraries of trackers: what one is opened with, and what it then takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnwise.runs.tracker import Tracker


class CannotOpen(ValueError):
    """A tracker cannot be opened, in a line that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What a tracker is opened with.

    Example:
        TrackedRun(recipe={"steps": 50}, project="turnwise", name="quickstart", folder=Path("runs/quickstart/trackers"))
    """

    recipe: Mapping[str, Any]
    """The whole recipe, nested, of JSON values."""
    project: str
    name: str
    """Of the run, for people."""
    folder: Path
    """Where this tracker may keep files of its own."""
    id: str = ""
    """Of the run to continue; empty for a new one."""
    after: int = -1
    """The last step that stays: a resumed run goes on after it. -1 where no step stays."""


class LibraryTracker(Tracker, Protocol):
    """A tracker of a library, open."""

    id: str
    """By which a resume continues the same run."""
    where: str
    """Where a person finds the run."""
