"""What a batched call costs: a fixed price and a price per item, fitted to the calls that were made."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

FLOOR = 1e-6
"""Seconds that either price is at least: a ratio of them always exists."""


@dataclass(frozen=True, slots=True)
class CallCosts:
    """A call of n items lasts per_call + per_item * n seconds.

    Example:
        CallCosts(per_call=6.0, per_item=0.05)
    """

    per_call: float
    per_item: float


class CostFit:
    """Least squares over the newest calls. Old ones are forgotten, because prices change and first calls are slow."""

    def __init__(self, window: int = 64) -> None:
        self.calls: deque[tuple[int, float]] = deque(maxlen=window)
        self.costs: CallCosts | None = None
        """None where all calls that are remembered had the same size."""

    def observe(self, size: int, seconds: float) -> None:
        self.calls.append((size, seconds))
        self.costs = fit(list(self.calls))


def fit(calls: list[tuple[int, float]]) -> CallCosts | None:
    """The prices that fit best, from (size, seconds) of calls; None where all have the same size.

    The price of a call is no more than the quickest call took. Where items run side by side, a call takes as long as
    the slowest of them, and a straight line through sizes and seconds would take that for a price of the call.
    """
    mean_size = sum(size for size, _ in calls) / len(calls)
    mean_seconds = sum(seconds for _, seconds in calls) / len(calls)
    spread = sum((size - mean_size) ** 2 for size, _ in calls)
    if not spread:
        return None
    slope = sum((size - mean_size) * (seconds - mean_seconds) for size, seconds in calls) / spread
    per_call = min(mean_seconds - slope * mean_size, *(seconds for _, seconds in calls))
    per_call = max(FLOOR, per_call)
    squares = sum(size * size for size, _ in calls)
    return CallCosts(per_call, max(FLOOR, sum(size * (seconds - per_call) for size, seconds in calls) / squares))
