"""Held-out success of a run by version of its weights, and whether two evaluations differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from turnwise.inspect.attempts import Query
from turnwise.inspect.metric_log import is_finite
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.evaluations import evaluated
from turnwise.runs.interval import Estimate, clustered, difference_interval, independent_attempts, rate_of
from turnwise.runs.significance import paired_p_value, unpaired_p_value
from turnwise.types import Status

KINDS = ("sampled", "greedy")
COUNTING = {str(status) for status in Status if status.counts}
ROUNDING = 1e-6
"""Rewards are sums, and sums are rounded: one that misses the threshold by so little has reached it."""
Tallies = Mapping[tuple[str, str], tuple[int, int]]
"""(successes, attempts) by dataset and id of a task."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Success of one version of the weights on held-out tasks, with its 95 % interval."""

    kind: str
    version: int
    success: float
    low: float
    high: float
    attempts: int
    tasks: int

    @property
    def estimate(self) -> Estimate:
        return self.success, self.low, self.high


def held_out_of(run: RunReader) -> dict[str, list[HeldOut]]:
    """By kind: the evaluations of a run in the order of their versions. Those that metrics.jsonl lacks are counted from
    their attempts."""
    found: dict[tuple[int, str], HeldOut] = {}
    for line in run.metrics.lines:
        for kind in KINDS:
            if (one := of_line(line, kind)) is not None:
                found[one.version, kind] = one
    for version, kind in evaluated(run.folder.evaluations):
        if (version, kind) not in found and (counts := tallies_of(run, kind, version)):
            tallies = list(counts.values())
            low, high = clustered(tallies)
            attempts = sum(tried for _, tried in tallies)
            found[version, kind] = HeldOut(kind, version, rate_of(tallies), low, high, attempts, len(tallies))
    kinds = [*KINDS, *sorted({kind for _, kind in found} - set(KINDS))]
    series = {kind: [found[key] for key in sorted(found) if key[1] == kind] for kind in kinds}
    return {kind: evaluations for kind, evaluations in series.items() if evaluations}


def of_line(line: Mapping[str, Any], kind: str) -> HeldOut | None:
    """The evaluation that a line of metrics has, if any."""
    names = ("success", "success_low", "success_high", "attempts", "tasks", "version")
    values = {name: line.get(f"eval/{kind}/{name}") for name in names}
    success, low, high, attempts, tasks, version = (
        float(value) if is_finite(value) else math.nan for value in values.values()
    )
    if not 0.0 <= success <= 1.0:
        return None
    if not low <= success <= high:
        low, high = math.nan, math.nan
    counts = (int(value) if value >= 0 else 0 for value in (attempts, tasks))
    return HeldOut(kind, line["step"] if math.isnan(version) else int(version), success, low, high, *counts)


def success_threshold(run: RunReader) -> float:
    """The reward from which an attempt of a run is a success."""
    rollout = run.config.get("rollout")
    value = rollout.get("success_threshold") if isinstance(rollout, dict) else None
    return float(value) if is_finite(value) else 1.0


def tallies_of(run: RunReader, kind: str, version: int) -> Tallies:
    """How often each task of an evaluation was attempted, and with success; an attempt that failed has not succeeded.
    Empty where its attempts are not there any more."""
    chosen = run.attempts.chosen(Query(kind=kind, first_step=version, last_step=version))
    if chosen is None:
        return {}
    tasks = list(zip(chosen["dataset"].to_pylist(), chosen["task"].to_pylist(), strict=True))
    successes, attempts = Counter[tuple[str, str]](), Counter(tasks)
    for task, succeeded in zip(tasks, succeeded_in(run, chosen), strict=True):
        successes[task] += int(succeeded)
    return {task: (successes[task], attempts[task]) for task in attempts}


def succeeded_in(run: RunReader, table: Any) -> list[bool]:
    """Which attempts of a table succeeded."""
    reached = table["reward"].to_numpy() >= success_threshold(run) - ROUNDING
    counts = [status in COUNTING for status in table["status"].to_pylist()]
    return [bool(one and other) for one, other in zip(reached, counts, strict=True)]


# ---------------------------------------------------------------- two of them


@dataclass(frozen=True, slots=True)
class Contrast:
    """How much the success of a second evaluation differs from that of a first."""

    change: float
    low: float
    high: float
    """The 95 % interval of the change."""
    p_value: float
    paired_tasks: int
    """Tasks that both attempted and that were compared one by one; 0 where the tasks differ."""
    better: int = 0
    """Of the paired tasks, those with a larger share of successes in the second."""
    worse: int = 0

    @property
    def test(self) -> str:
        if self.paired_tasks:
            return f"paired over {self.paired_tasks:,} tasks: {self.better:,} better, {self.worse:,} worse"
        return "unpaired: the tasks are not the same or not recorded"

    @property
    def is_clear(self) -> bool:
        """Whether chance alone makes such a difference in fewer than 1 of 20 comparisons."""
        return self.p_value < 0.05


def contrast(first: HeldOut, second: HeldOut, first_tallies: Tallies, second_tallies: Tallies) -> Contrast | None:
    """The second against the first: task by task where at least half of the tasks of one are tasks of the other.
    None where neither attempts nor intervals are recorded."""
    both = sorted(first_tallies.keys() & second_tallies.keys())
    if both and 2 * len(both) >= min(len(first_tallies), len(second_tallies)):
        return paired([first_tallies[task] for task in both], [second_tallies[task] for task in both])
    if not all(map(math.isfinite, (*first.estimate, *second.estimate))):
        return None
    low, high = difference_interval(first.estimate, second.estimate)
    counts = [
        independent_attempts(list(tallies.values())) if tallies else float(one.tasks)
        for one, tallies in ((first, first_tallies), (second, second_tallies))
    ]
    p_value = unpaired_p_value(first.success, counts[0], second.success, counts[1])
    return Contrast(second.success - first.success, low, high, p_value, 0)


def paired(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> Contrast:
    """The comparison of the same tasks in the same order."""
    rates = [(Fraction(*one), Fraction(*two)) for one, two in zip(first, second, strict=True)]
    differences = [two - one for one, two in rates]
    estimates = [(rate_of(tallies), *clustered(tallies)) for tallies in (first, second)]
    low, high = difference_interval(estimates[0], estimates[1], correlation(rates))
    return Contrast(
        change=estimates[1][0] - estimates[0][0],
        low=low,
        high=high,
        p_value=paired_p_value(differences),
        paired_tasks=len(rates),
        better=sum(difference > 0 for difference in differences),
        worse=sum(difference < 0 for difference in differences),
    )


def correlation(pairs: Sequence[tuple[Fraction, Fraction]]) -> float:
    """Pearson's correlation; 0 where one side does not vary."""
    one, two = np.array(pairs, np.float64).T
    if one.std() == 0.0 or two.std() == 0.0:
        return 0.0
    return float(np.corrcoef(one, two)[0, 1])
