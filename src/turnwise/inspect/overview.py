"""The few numbers that sum a run up: how far it is, what it achieved, what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.inspect.held_out import Contrast, HeldOut, contrast, held_out_of, tallies_of
from turnwise.inspect.metric_log import is_finite
from turnwise.inspect.run_reader import RunReader

EVALUATION_SECONDS = "seconds/evaluation/"
"""Beginnings of the names under which the seconds of evaluations were ever logged."""


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run in numbers; what is not recorded is NaN or absent."""

    name: str
    environments: tuple[str, ...]
    step: int
    """The last that is logged."""
    steps: int | None
    """Those of the recipe."""
    is_over: bool
    updates: int | None
    attempts: int
    """Training attempts, those that do not count too."""
    sampled_tokens: int
    """By training attempts that count, of kept and dropped groups."""
    seconds: float
    """Warm start, training and evaluations."""
    stages: Mapping[str, float]
    """Seconds by what was done."""
    held_out: Mapping[str, list[HeldOut]]

    @classmethod
    def of(cls, run: RunReader) -> RunOverview:
        metrics, config, summary = run.metrics, run.config, run.summary
        stages = stages_of(run)
        updates = summary.get("updates")
        return cls(
            name=run.folder.path.resolve().name,
            environments=environments_of(config),
            step=max((line["step"] for line in metrics.lines), default=0),
            steps=whole(config.get("steps")),
            is_over=bool(summary),
            updates=whole(updates),
            attempts=int(total(run, "trajectory/count") + total(run, "trajectory/failed")),
            sampled_tokens=sampled_tokens(run),
            seconds=wall_seconds(run, stages),
            stages=stages,
            held_out=held_out_of(run),
        )

    def before(self, kind: str) -> HeldOut | None:
        """The evaluation of the weights that training started from."""
        evaluations = self.held_out.get(kind)
        return evaluations[0] if evaluations and evaluations[0].version == 0 else None

    def after(self, kind: str) -> HeldOut | None:
        """The newest evaluation of trained weights."""
        evaluations = self.held_out.get(kind)
        return evaluations[-1] if evaluations and evaluations[-1].version > 0 else None

    def gain(self, run: RunReader, kind: str) -> Contrast | None:
        """After training against before."""
        before, after = self.before(kind), self.after(kind)
        if before is None or after is None:
            return None
        return contrast(before, after, tallies_of(run, kind, before.version), tallies_of(run, kind, after.version))


def environments_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the environments of a recipe are called."""
    entries = config.get("env")
    entries = entries if isinstance(entries, list) else []
    return tuple(str(entry.get("dataset") or entry.get("name")) for entry in entries if isinstance(entry, dict))


def stages_of(run: RunReader) -> dict[str, float]:
    """Seconds of the parts of a run, as far as they are logged."""
    of_summary = summary_seconds(run)
    evaluations = [name for name in run.metrics.names if name.startswith(EVALUATION_SECONDS)]
    return {
        "warm start": number(of_summary.get("warm_start")),
        "steps": total(run, "seconds/step"),
        "evaluations": math.fsum(total(run, name) for name in evaluations),
        "records": number(of_summary.get("record")),
    }


def wall_seconds(run: RunReader, stages: Mapping[str, float]) -> float:
    """From start to end, without pauses between a stop and a resume: what the run itself measured where it is over,
    and otherwise the sum of its parts. Evaluations that overlap training take no time of their own."""
    first = {name: number(line.get(name)) for line in run.metrics.lines if line["step"] == 0 for name in line}
    before = math.fsum(value for name, value in first.items() if name.startswith(EVALUATION_SECONDS))
    schedule = run.config.get("schedule")
    overlap = isinstance(schedule, dict) and bool(schedule.get("overlap_evaluations"))
    training = number(summary_seconds(run).get("train"))
    if not training:
        training = stages["steps"] + (0.0 if overlap else stages["evaluations"] - before)
    return stages["warm start"] + before + training


def summary_seconds(run: RunReader) -> Mapping[str, Any]:
    """Seconds by stage of a run that is over."""
    seconds = run.summary.get("seconds")
    return seconds if isinstance(seconds, dict) else {}


def total(run: RunReader, name: str) -> float:
    """The sum of a metric over all lines."""
    return math.fsum(value for _, value in run.metrics.series(name))


def sampled_tokens(run: RunReader) -> int:
    """Tokens that training attempts sampled: of each step the attempts times the mean of their tokens."""
    lines = run.metrics.lines
    products = (number(line.get("trajectory/count")) * number(line.get("trajectory/action_tokens")) for line in lines)
    return round(math.fsum(products))


def number(value: Any) -> float:
    return float(value) if is_finite(value) else 0.0


def whole(value: Any) -> int | None:
    return int(value) if is_finite(value) else None
