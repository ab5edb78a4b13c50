"""Success and reward of each training step, with intervals over its groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.inspect.attempts import TRAINING, Query
from turnwise.inspect.held_out import COUNTING, succeeded_in
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.interval import clustered, half_width


@dataclass(frozen=True, slots=True)
class StepSpread:
    """The 95 % intervals of a step. Attempts of a group are alike, so that the groups are what is independent."""

    step: int
    success_low: float
    success_high: float
    reward: float
    """Mean over all attempts that count."""
    reward_half_width: float
    """NaN with a single group."""


def spreads_of(run: RunReader) -> Iterator[StepSpread]:
    """The intervals of each step that the archive has, in order."""
    chosen = run.attempts.chosen(Query(kind=TRAINING))
    if chosen is None or not chosen.num_rows:
        return
    counts = np.array([status in COUNTING for status in chosen["status"].to_pylist()], bool)
    steps, groups = (chosen[name].to_numpy()[counts] for name in ("step", "group"))
    rewards = chosen["reward"].to_numpy()[counts]
    succeeded = np.array(succeeded_in(run, chosen), bool)[counts]
    order = np.lexsort((groups, steps))
    steps, groups, rewards, succeeded = steps[order], groups[order], rewards[order], succeeded[order]
    for place in parts(steps):
        in_groups = [slice(place.start + part.start, place.start + part.stop) for part in parts(groups[place])]
        tallies = [(int(succeeded[part].sum()), part.stop - part.start) for part in in_groups]
        low, high = clustered(tallies)
        means = [float(rewards[part].mean()) for part in in_groups]
        half = half_width(means) if len(means) > 1 else math.nan
        yield StepSpread(int(steps[place.start]), low, high, float(rewards[place].mean()), half)


def parts(sorted_values: NDArray[Any]) -> list[slice]:
    """Where each run of equal values is."""
    if not len(sorted_values):
        return []
    edges = np.flatnonzero(np.diff(sorted_values)) + 1
    return [slice(int(a), int(b)) for a, b in zip([0, *edges], [*edges, len(sorted_values)], strict=True)]
