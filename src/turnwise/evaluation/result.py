"""Evaluation: held-out tasks through the same agent loop, in one pool, on one version of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnwise.rollout.concurrently import all_of
from turnwise.rollout.group import GroupMaker
from turnwise.runs.describe import describe
from turnwise.runs.interval import clustered
from turnwise.types import Group, Task, Trajectory

OF_TRAINING = ("lag/", "groups/", "stop/", "reward/std", "turn/reward", "success/", "reward/")
KEPT = ("reward/mean", "reward/min", "reward/max")


@dataclass(frozen=True, slots=True)
class Result:
    """What an evaluation found.

    Example:
        Result(groups, success_at=1.0).metrics(version=10)["success"]
    """

    groups: tuple[Group, ...]
    success_at: float

    @property
    def attempts(self) -> list[Trajectory]:
        """All that were made, those that do not count too."""
        return [trajectory for group in self.groups for trajectory in (*group.trajectories, *group.failed)]

    @property
    def versions(self) -> set[int]:
        """Of the weights that sampled its actions: one, unless nothing was sampled at all."""
        turns = [turn for trajectory in self.attempts for turn in trajectory.turns]
        return {version for turn in turns for version in turn.versions.tolist()}

    @property
    def tallies(self) -> list[tuple[int, int]]:
        """(successes, attempts) of each task; an attempt that failed has not succeeded."""
        return [
            (
                sum(trajectory.total >= self.success_at for trajectory in group.trajectories),
                len(group.trajectories) + len(group.failed),
            )
            for group in self.groups
        ]

    @property
    def num_attempts(self) -> int:
        return sum(attempts for _, attempts in self.tallies)

    @property
    def num_successes(self) -> int:
        return sum(successes for successes, _ in self.tallies)

    @property
    def num_failed(self) -> int:
        """Attempts that do not count: failed, timed out, or without room for their first prompt."""
        return sum(len(group.failed) for group in self.groups)

    @property
    def success(self) -> float:
        """Share of all attempts that succeeded."""
        return self.num_successes / max(1, self.num_attempts)

    def metrics(self, version: int) -> dict[str, float]:
        """Overall and, where there are several, of each dataset; `version` is that of the weights."""
        described = describe(self.groups, (), version=version, success_at=self.success_at)
        chosen = {name: value for name, value in described.items() if name in KEPT or not name.startswith(OF_TRAINING)}
        metrics = {**chosen, **self.headline, "version": float(version)}
        for name, part in self.by_dataset.items():
            metrics |= {f"{name}/{key}": value for key, value in part.headline.items()}
        return metrics

    @property
    def by_dataset(self) -> dict[str, Result]:
        """The part of each dataset, where there are several."""
        names = sorted({group.task.dataset for group in self.groups})
        return {
            name: Result(tuple(group for group in self.groups if group.task.dataset == name), self.success_at)
            for name in (names if len(names) > 1 else ())
        }

    @property
    def headline(self) -> dict[str, float]:
        """Success with its interval, pass@k, and how many tasks and attempts these are of."""
        low, high = clustered(self.tallies)
        return {
            "success": self.success,
            "success_low": low,
            "success_high": high,
            "attempts": float(self.num_attempts),
            "tasks": float(len(self.groups)),
            "return": mean_total(self.groups),
            **{f"pass@{k}": pass_at(k, self.tallies) for k in self.pass_sizes},
        }

    @property
    def pass_sizes(self) -> list[int]:
        """The k of pass@k: powers of two for which every task has enough attempts."""
        fewest = min((attempts for _, attempts in self.tallies), default=0)
        return [k for k in (2, 4, 8, 16, 32, 64, 128) if k <= fewest]


def mean_total(groups: Sequence[Group]) -> float:
    """The mean total of the attempts that count; NaN where none does."""
    totals = [trajectory.total for group in groups for trajectory in group.trajectories]
    return math.fsum(totals) / len(totals) if totals else math.nan


def pass_at(k: int, tallies: Sequence[tuple[int, int]]) -> float:
    """The chance that of k attempts at a task at least one succeeds, without bias: the share of all choices of k from
    the attempts made that hold a success, averaged over tasks."""
    chances = []
    for successes, attempts in tallies:
        if attempts < k:
            raise ValueError(f"pass@{k} needs {k} attempts at every task, and one has {attempts}")
        chances.append(1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k))
    return math.fsum(chances) / len(chances) if chances else math.nan


async def evaluate(
    practice: GroupMaker, tasks: Sequence[Task], success_at: float, seen: Callable[[Group], None] = lambda group: None
) -> Result:
    """Attempts at every task at once; the engine decides how many run together. Each group is `seen` when it is made,
    by whoever shows progress."""

    async def made(task: Task) -> Group:
        group = await practice.group(task, epoch=0)
        seen(group)
        return group

    return Result(tuple(await all_of(made(task) for task in tasks)), success_at)
