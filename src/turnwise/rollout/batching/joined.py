"""Reports of several queues of the same calls as one: those of a run and of its rollout workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

PER_ITEM = ("wait_seconds",)
PER_CALL = ("size_mean", "call_seconds", "slot_use", "fitted/per_call", "fitted/per_item")
"""Figures that are means, over items and over calls (`MicroBatcher.report`); the largest size is a maximum, and all
others are counts."""


def joined_reports(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One report: counts add up, and means are weighted by what they are over.

    Example:
        joined_reports([{"batch/a/step/calls": 2.0}, {"batch/a/step/calls": 3.0}])
    """
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        queue, _, figure = name.rpartition("/") if "/fitted/" not in name and "/flush/" not in name else parted(name)
        values = [(report[name], report) for report in reports if name in report and not math.isnan(report[name])]
        if figure == "size_max":
            joined[name] = max((value for value, _ in values), default=math.nan)
        elif figure in (*PER_ITEM, *PER_CALL):
            over = "items" if figure in PER_ITEM else "calls"
            weights = [(value, report.get(f"{queue}/{over}", 0.0)) for value, report in values]
            total = sum(weight for _, weight in weights)
            joined[name] = sum(value * weight for value, weight in weights) / total if total else math.nan
        else:
            joined[name] = sum(value for value, _ in values)
    return joined


def parted(name: str) -> tuple[str, str, str]:
    """(queue, separator, figure) of a name whose figure has two words."""
    queue, figure, detail = name.rsplit("/", 2)
    return queue, "/", f"{figure}/{detail}"
