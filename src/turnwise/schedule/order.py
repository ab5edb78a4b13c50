"""The order in which groups are trained on: as they started, as they finish, or as they finish while none is late."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from turnwise.schedule.tasks import Draw
from turnwise.types import Group

Order = Literal["started", "finished", "due"]


@dataclass(frozen=True, slots=True)
class Started:
    """A group whose attempts have started."""

    draw: Draw
    task: asyncio.Task[Group]
    version: int
    """Of the weights that were live before its first token."""


@dataclass(frozen=True, slots=True)
class Line:
    """The groups that started and were not taken, and what the step that takes one of them still needs.

    Example: step 7 has two of its eight groups
        Line(started, ready, step=7, left=6, groups_per_step=8, max_lag=2)
    """

    started: Sequence[Started]
    """In the order they started."""
    ready: Sequence[Started]
    """Those that have finished, in the order they did."""
    step: int
    """Which step takes; also the version that is trained."""
    left: int
    """Groups that the step still needs, the next one included."""
    groups_per_step: int
    max_lag: int

    def due(self, entry: Started) -> int:
        """The last step that may train on the first token of a group."""
        return entry.version + self.max_lag


def first_started(line: Line) -> Started | None:
    return line.started[0] if line.started and line.started[0] in line.ready else None


def first_finished(line: Line) -> Started | None:
    return line.ready[0] if line.ready else None


def first_in_time(line: Line) -> Started | None:
    """The group that finished first among those that may be taken without making another one late.

    None is late as long as, for every step d, the groups due by d are no more than the places up to d: `left` in this
    step and groups_per_step in each one after it. Taking a group uses up a place of all these counts, and lowers the
    number of groups due from its own due step on. So where the groups due by some d fill their places, the next one
    must be one of them.
    """
    full = first_full_step(line)
    return next((entry for entry in line.ready if full is None or line.due(entry) <= full), None)


def first_full_step(line: Line) -> int | None:
    """The first step by which as many groups are due as there are places up to it; None where there is none."""
    num_due = 0
    for step, count in sorted(Counter(map(line.due, line.started)).items()):
        num_due += count
        if num_due >= line.left + line.groups_per_step * (step - line.step):
            return step
    return None


ORDERS: Mapping[Order, Callable[[Line], Started | None]] = MappingProxyType(
    {"started": first_started, "finished": first_finished, "due": first_in_time}
)
"""Which group a step takes next; None while that one has not finished."""
