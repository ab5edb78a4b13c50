"""The metrics of a run, read as they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

LARGEST = 1e300
LARGEST_STEP = 2**53
TAIL = 256
"""Bytes of the last line that are compared, to notice a file that a resume has cut back."""


class MetricLog:
    """The lines of metrics.jsonl that are complete. A line that is no JSON object is counted and left out.

    Example:
        log = MetricLog(Path("runs/quickstart/metrics.jsonl"))
        log.refresh()
        log.series("reward/mean") == [(1, 0.25), (2, 0.31)]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.num_unreadable = 0
        self.offset = 0
        self.tail = b""

    def refresh(self) -> bool:
        """Read what was added. Whether anything was, or the file has become another."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.offset - len(self.tail)))
                if file.read(len(self.tail)) != self.tail:
                    self.clear()
                    file.seek(0)
                added = file.read()
        except OSError:
            changed = bool(self.lines)
            self.clear()
            return changed
        complete = added[: added.rfind(b"\n") + 1]
        for line in complete.splitlines():
            self.add(line)
        self.offset += len(complete)
        self.tail = (self.tail + complete)[-TAIL:]
        return bool(complete)

    def add(self, line: bytes) -> None:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and is_step(value.get("step")):
            self.lines.append(value)
        elif line.strip():
            self.num_unreadable += 1

    @property
    def names(self) -> list[str]:
        """The metrics that have a value somewhere, sorted."""
        return sorted({name for line in self.lines for name, value in line.items() if is_finite(value)} - {"step"})

    @property
    def finite_lines(self) -> list[dict[str, float]]:
        """The lines with the values that can be drawn, and nothing else."""
        return [{name: value for name, value in line.items() if is_finite(value)} for line in self.lines]

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever a metric has a finite value."""
        values = ((line["step"], line.get(name)) for line in self.lines)
        return [(step, float(value)) for step, value in values if is_finite(value)]


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value of a line is a number that can be drawn; JSON has integers of any size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def is_step(value: Any) -> TypeGuard[int]:
    """Whether a value is a step that a picture can show."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_STEP
