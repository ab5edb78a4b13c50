"""Tasks that rest: those at which all attempts were paid alike come again later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.credit.filters import has_signal
from turnwise.types import Group


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of the attempts at a task, and how many draws had been made when the order of tasks heard of it."""

    draws: int
    dataset: str
    task: str
    differed: bool
    """Whether the attempts were paid differently: only then do estimators that compare them give credit."""


def heard_of(groups: Sequence[Group], draws: int) -> list[Heard]:
    """What groups say of their tasks; one whose attempts all failed to count says nothing."""
    return [
        Heard(draws, group.task.dataset, group.task.id, has_signal(group)) for group in groups if group.trajectories
    ]


@dataclass(slots=True)
class Rests:
    """Which tasks of a dataset rest, and for how many rounds through it.

    A task at which all attempts were paid alike rests for one round, then for 2, 4, ... up to `longest` if the same
    happens again; attempts that differ end that. No task rests for ever, so one that was hopeless is met again when the
    policy is better, and one that was solved when it may have been unlearned.

    Example:
        rests = Rests(longest=8)
        rests.hear("hops-1", differed=False)
        rests.passes_over("hops-1")      # True, once
    """

    longest: int
    lengths: dict[str, int] = field(default_factory=dict)
    """By task: the rounds of its last rest."""
    left: dict[str, int] = field(default_factory=dict)
    """By task: the rounds for which it still rests."""

    def hear(self, task: str, *, differed: bool) -> None:
        if differed:
            self.lengths.pop(task, None)
            self.left.pop(task, None)
        elif self.longest:
            self.lengths[task] = min(self.longest, 2 * self.lengths.get(task, 0) or 1)
            self.left[task] = self.lengths[task]

    def passes_over(self, task: str) -> bool:
        """Whether a task that is met rests; its rest is then a round shorter."""
        left = self.left.pop(task, 0)
        if left > 1:
            self.left[task] = left - 1
        return left > 0
