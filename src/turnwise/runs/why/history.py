"""The metrics of a run so far, as columns that checks can look back on."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Reads = Callable[[str], bool]
"""Whether a metric is worth keeping."""


class Columns:
    """Some metrics of many lines. A value that a line lacks is NaN.

    Example:
        columns = Columns(lambda name: name == "success")
        columns.append({"success": 0.5})
        columns.last("success", 3)
    """

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.values: dict[str, array[float]] = {}
        self.steps: list[int] = []

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line, which may come from a file that somebody else wrote."""
        for name, value in line.items():
            if self.reads(name) and is_number(value):
                column = self.values.setdefault(name, array("d"))
                column.extend([math.nan] * (len(self) - len(column)))
                column.append(float(value))
        self.steps.append(int(line.get("step", len(self))))

    def all(self, name: str) -> NDArray[np.float64]:
        """A metric of every line."""
        return self.last(name, len(self))

    def last(self, name: str, count: int) -> NDArray[np.float64]:
        """A metric of the last lines: `count` of them, or as many as there are."""
        size = len(self.steps)
        count = min(count, size)
        column = self.values.get(name)
        known = np.array(column[size - count :] if column else (), np.float64)
        return known if len(known) == count else np.concatenate([known, np.full(count - len(known), math.nan)])

    def latest(self, name: str) -> float:
        """A metric of the last line."""
        return float(self.last(name, 1)[0]) if len(self) else math.nan

    def under(self, prefix: str) -> dict[str, str]:
        """The metrics whose names begin with a prefix, by what follows it."""
        return {name.removeprefix(prefix): name for name in sorted(self.values) if name.startswith(prefix)}


class MetricHistory:
    """What a run has logged so far: its training steps, and its held-out evaluations.

    Example:
        history = MetricHistory.of(read_metrics(folder.metrics), reads=lambda name: True)
        history.training.last("success", 5)
    """

    def __init__(self, reads: Reads) -> None:
        self.training = Columns(reads)
        """Lines of steps that took groups. One that could keep none, after which the run stopped, is the last."""
        self.evaluations = Columns(reads)
        """Lines with a held-out evaluation, of the start too."""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]], reads: Reads) -> MetricHistory:
        history = cls(reads)
        for line in lines:
            history.append(line)
        return history

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics."""
        if "groups/kept" in line:
            self.training.append(line)
        if "eval/sampled/success" in line:
            self.evaluations.append(line)

    @property
    def step(self) -> int:
        """The last step that is known of."""
        return max([*self.training.steps[-1:], *self.evaluations.steps[-1:]], default=0)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e308


def mean(values: NDArray[np.float64]) -> float:
    """The mean of the values that are known; NaN where none is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
