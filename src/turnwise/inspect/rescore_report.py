"""What other rewards would have paid for recorded attempts: each attempt before and after, and the lines about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.inspect.attempts import AttemptKey
from turnwise.inspect.show import shortened
from turnwise.runs.screen import table
from turnwise.runs.transcript import visible
from turnwise.types import Status

LARGEST = 10
"""Changes that are listed."""
MOST_REASONS = 3
SAME = 1e-9
"""Difference of two rewards that are equal but for rounding."""
DIFFERED = (
    "in {} attempts the conversation would have differed: their new reward is for what was said, and the policy might "
    "have said something else"
)


@dataclass(frozen=True, slots=True)
class RescoredAttempt:
    """What an attempt was paid when it was made, and what it is paid now."""

    key: AttemptKey
    task: str
    before: float
    after: float
    status_before: Status
    status_after: Status
    difference: str = ""
    """Where the environment answered otherwise than recorded; empty where it did not."""
    failure: str = ""

    @property
    def counts(self) -> bool:
        """Whether it has a reward before and after."""
        return self.status_before.counts and self.status_after.counts

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class RescoreReport:
    """All attempts of a run that were scored again."""

    title: str
    attempts: tuple[RescoredAttempt, ...]
    success_at: float
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @property
    def counted(self) -> list[RescoredAttempt]:
        return [attempt for attempt in self.attempts if attempt.counts]

    @property
    def changed(self) -> list[RescoredAttempt]:
        """Attempts with another reward, the largest change first."""
        found = [attempt for attempt in self.counted if abs(attempt.change) > SAME]
        return sorted(found, key=lambda attempt: -abs(attempt.change))

    def describe(self) -> list[str]:
        """Lines for a person."""
        counted = self.counted
        lines = [self.title, *self.notes, *failure_lines(self.attempts)]
        if not counted:
            return [*lines, "no attempt has a reward before and after"]
        lines += ["", *self.summary_lines()]
        if differed := [attempt for attempt in self.attempts if attempt.difference]:
            lines += ["", DIFFERED.format(f"{len(differed):,} of {len(self.attempts):,}"), *reasons(differed)]
        return lines + self.change_lines()

    def summary_lines(self) -> list[str]:
        before, after = (np.array([getattr(one, name) for one in self.counted]) for name in ("before", "after"))
        won, wins = before >= self.success_at, after >= self.success_at
        rows = [
            ("mean reward", f"{before.mean():.4f}", f"{after.mean():.4f}"),
            (f"success (reward of {self.success_at:g})", f"{won.mean():.4f}", f"{wins.mean():.4f}"),
            ("  succeeded before", "", f"{(won & wins).sum():,} of {won.sum():,}"),
            ("  did not", "", f"{(~won & wins).sum():,} of {(~won).sum():,}"),
        ]
        return [
            *table((f"{len(before):,} attempts", "before", "after"), rows),
            f"{len(self.changed):,} rewards changed; correlation of before and after {correlation(before, after)}",
        ]

    def change_lines(self) -> list[str]:
        """The largest changes, with keys for `turnwise show`."""
        rows = [
            (
                str(one.key),
                shortened(visible(one.task)),
                f"{one.before:.4g}",
                f"{one.after:.4g}",
                f"{one.change:+.4g}",
                one.difference or "-",
            )
            for one in self.changed[:LARGEST]
        ]
        head = ("attempt", "task", "before", "after", "change", "differed")
        return ["", "largest changes", *table(head, rows)] if rows else []


def correlation(one: np.ndarray, other: np.ndarray) -> str:
    if not one.std() or not other.std():
        return "unknown, because one of them is the same everywhere"
    return f"{np.corrcoef(one, other)[0, 1]:.4f}"


def reasons(attempts: Sequence[RescoredAttempt]) -> list[str]:
    """The commonest differences."""
    counts = Counter(attempt.difference for attempt in attempts).most_common(MOST_REASONS)
    return [f"  {count:,} x {reason}" for reason, count in counts]


def failure_lines(attempts: Sequence[RescoredAttempt]) -> list[str]:
    """How many attempts have no reward now, and why."""
    failed = [one for one in attempts if not one.status_after.counts]
    anew = sum(one.status_before.counts for one in failed)
    if not failed:
        return []
    kinds = Counter((str(one.status_after), visible(one.failure)) for one in failed).most_common(MOST_REASONS)
    text = f"{len(failed):,} attempts have no reward now, of which {anew:,} had one"
    return [text, *(f"  {count:,} x {status}{f': {why}' if why else ''}" for (status, why), count in kinds)]
