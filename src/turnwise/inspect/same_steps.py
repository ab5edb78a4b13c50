"""Two runs compared step by step: whether a replay has the numbers that the recorded run has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from turnwise.runs.tracker import read_metrics

NOT_TRAINING = ("seconds/", "speed/", "eval/", "batch/", "weight_check/")
"""What a clock, an evaluation, an environment call or an engine has given."""
SHOWN = ("loss", "gradient_norm", "gap/mean")
MOST_NAMES = 5


def compare_steps(recorded: Path, replayed: Path, first: int) -> list[str]:
    """Lines for a person: up to which step two files of metrics agree, and what differs first. Step 1 of the replay is
    step `first` of the recorded run."""
    before, after = by_step(recorded, first - 1), by_step(replayed, 0)
    steps = sorted(step for step in after if step > 0 and step in before)
    if not steps:
        return [f"{recorded} has no line of these steps, so nothing is compared"]
    for step in steps:
        if names := different(before[step], after[step]):
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            shown = next((name for name in SHOWN if name in names), names[0])
            listed = ", ".join(names[:MOST_NAMES])
            return [
                f"step {step} is the first that differs from the recorded run, in {listed}{more}",
                f"{shown}: {before[step][shown]:.9g} recorded, {after[step][shown]:.9g} now",
            ]
    return [f"all {len(steps)} steps have the recorded numbers, bit for bit"]


def by_step(path: Path, earlier: int) -> dict[int, dict[str, float]]:
    """By step, counted from another: its metrics, of all lines that it has."""
    found: dict[int, dict[str, float]] = {}
    for line in read_metrics(path) if path.exists() else ():
        found.setdefault(int(line["step"]) - earlier, {}).update(line)
    return found


def different(one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """Names of metrics of training that both have, with other values."""
    names = [name for name in one if name in other and name != "step" and not name.startswith(NOT_TRAINING)]
    return sorted(name for name in names if not is_same(one[name], other[name]))


def is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
