"""The budget of checks: which loads are checked, so that checks take no more than a share of a run's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.02
"""Of the time since training began, that checks of loads may take."""


class CheckBudget:
    """Time that checks have taken, and may. A check is due when another one like the last would stay within the share.

    Example:
        budget = CheckBudget()
        if budget.is_due:
            with budget.spending():
                ...
    """

    def __init__(self, share: float = SHARE, clock: Callable[[], float] = time.perf_counter) -> None:
        self.share = share
        self.clock = clock
        self.began = clock()
        self.spent = 0.0
        self.last = 0.0
        """Seconds of the last check."""

    @property
    def is_due(self) -> bool:
        return self.spent + self.last <= self.share * (self.clock() - self.began)

    @contextmanager
    def spending(self) -> Iterator[None]:
        began = self.clock()
        try:
            yield
        finally:
            self.last = self.clock() - began
            self.spent += self.last
