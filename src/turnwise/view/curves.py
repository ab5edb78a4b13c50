"""The curves of runs: what metrics there are, and their points, thinned to what a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.inspect.metric_log import MetricLog
from turnwise.runs.metric_names import metric_of
from turnwise.view.clipped import number, numbers
from turnwise.view.watched_run import WatchedRuns

POINTS = 1000
"""Points of a curve that are sent."""
FIRST_SHOWN = (
    "success",
    "reward/mean",
    "eval/sampled/success",
    "eval/greedy/success",
    "trajectory/turns",
    "trajectory/action_tokens",
    "loss",
    "entropy",
    "gradient_norm",
    "ratio",
    "clipped",
    "gap/max",
    "kl/reference",
    "lag/mean",
    "groups/zero_variance",
    "failure/rate",
    "seconds/step",
    "speed/tokens_per_second",
)
"""The metrics that a page shows unless others are asked for."""


described = lru_cache(10_000)(metric_of)


def metric_list(runs: WatchedRuns) -> list[dict[str, Any]]:
    """Every metric of the runs, with its unit and meaning."""
    names = sorted({name for run in runs for name in run.reader.metrics.names})
    order = {name: place for place, name in enumerate(FIRST_SHOWN)}
    found = []
    for name in names:
        known = described(name)
        about = {"unit": known.unit, "meaning": known.meaning, "healthy": known.healthy} if known else {}
        found.append({"name": name, "first": order.get(name), **about})
    return found


def curves(runs: WatchedRuns, names: Sequence[str]) -> dict[str, Any]:
    """By metric and run: steps, seconds of training until then, and values."""
    times = {run.name: seconds_of(run.reader.metrics) for run in runs}
    series = {name: {run.name: run.reader.metrics.series(name) for run in runs} for name in names}
    return {
        name: {run: points(values, times[run]) for run, values in of_runs.items() if values}
        for name, of_runs in series.items()
    }


def points(series: Sequence[tuple[int, float]], seconds: dict[int, float]) -> dict[str, Any]:
    steps = np.array([step for step, _ in series], np.int64)
    values = np.array([value for _, value in series], np.float64)
    kept = thinned(values, POINTS)
    known = sorted(seconds)
    before = np.searchsorted(known, steps[kept], side="right") - 1
    """The last step whose time is known: a step that a run stopped in has none."""
    return {
        "step": steps[kept].tolist(),
        "seconds": [number(seconds[known[place]]) if place >= 0 else 0.0 for place in before.tolist()],
        "value": numbers(values[kept].tolist()),
        "total": len(series),
    }


def thinned(values: NDArray[np.float64], limit: int) -> NDArray[np.int64]:
    """Places of at most `limit` values: the first, the last, and the smallest and largest of equal stretches, so that
    no spike is lost."""
    size = len(values)
    if size <= limit:
        return np.arange(size)
    edges = np.linspace(0, size, (limit - 2) // 2 + 1).astype(np.int64)
    kept = {0, size - 1}
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = values[start:end]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    return np.array(sorted(kept), np.int64)


def seconds_of(log: MetricLog) -> dict[int, float]:
    """By step: the seconds of all training steps until its end. Evaluations and a warm start are not in it."""
    total, found = 0.0, {}
    for step, seconds in log.series("seconds/step"):
        total += seconds
        found[step] = total
    return found
