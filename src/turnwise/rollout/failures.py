"""How attempts fail: the first failure of each kind is logged with its traceback; the others are counted."""

from __future__ import annotations

import logging
from collections import Counter

from turnwise.envs.raised import Raised

log = logging.getLogger(__name__)
MOST_KINDS = 40
"""Kinds that are distinguished; an environment can raise new ones for ever."""
OTHERS = "other kinds"
MOST_IN_A_LINE = 5


class Failures:
    """Counts the failures of attempts by kind: the type of an exception with the file and line that raised it.

    Example:
        failures = Failures()
        failures.note("train/maze/t-1/0/0/0 failed", Raised.of(error))
        failures.sum_up("step 3")
    """

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.counted: Counter[str] = Counter()
        """By kind, since the last `sum_up`; includes the first of each kind."""
        self.hidden: Counter[str] = Counter()
        """The failures among them that were not logged."""

    def note(self, what: str, raised: Raised, advice: str = "") -> None:
        """Count a failure, and log it if it is the first of its kind."""
        kind = raised.reason if raised.reason in self.kinds or len(self.kinds) < MOST_KINDS else OTHERS
        self.counted[kind] += 1
        if kind in self.kinds or kind == OTHERS:
            self.hidden[kind] += 1
            return
        self.kinds.add(kind)
        where = f" ({raised.where})" if raised.where else ""
        text = f"{raised.kind}: {raised.text}" if raised.text else raised.kind
        show(f"{what}: {text}{where}{f'; {advice}' if advice else ''}", raised.traceback)

    def sum_up(self, when: str) -> None:
        """Log in one line how many failures were not shown, if any, and start to count again."""
        hidden, self.hidden, self.counted = self.hidden, Counter(), Counter()
        if not hidden:
            return
        named = [f"{count} x {kind}" for kind, count in hidden.most_common(MOST_IN_A_LINE)]
        left = hidden.total() - sum(count for _, count in hidden.most_common(MOST_IN_A_LINE))
        rest = [f"{left} others"] if left else []
        log.warning("%s: %d more failures like those before: %s", when, hidden.total(), ", ".join([*named, *rest]))


def show(message: str, traceback: str) -> None:
    """Log a warning of one line with a traceback below it, which may come from another process."""
    record = log.makeRecord(log.name, logging.WARNING, __file__, 0, message, (), None, extra={"always_shown": True})
    record.exc_text = traceback or None
    if log.isEnabledFor(logging.WARNING):
        log.handle(record)
