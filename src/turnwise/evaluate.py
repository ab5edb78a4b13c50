"""Evaluation: held-out tasks through the same agent loop, in one pool, on one version of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.rollout.group import Practice
from turnwise.runs.describe import describe
from turnwise.runs.interval import wilson
from turnwise.types import Group, Task


@dataclass(frozen=True, slots=True)
class Result:
    """What an evaluation found."""

    groups: tuple[Group, ...]
    success_at: float

    @property
    def num_attempts(self) -> int:
        return sum(len(group.trajectories) + len(group.failed) for group in self.groups)

    @property
    def num_successes(self) -> int:
        return sum(t.total >= self.success_at for group in self.groups for t in group.trajectories)

    @property
    def success(self) -> float:
        """Share of all attempts that succeeded; one that failed has not."""
        return self.num_successes / max(1, self.num_attempts)

    def metrics(self, version: int) -> dict[str, float]:
        low, high = wilson(self.num_successes, self.num_attempts)
        described = describe(self.groups, (), version=version, success_at=self.success_at)
        chosen = {
            name: value
            for name, value in described.items()
            if not name.startswith(("lag/", "groups/", "stop/", "reward/std", "turn/reward"))
        }
        names = {group.task.dataset for group in self.groups}
        for name in names if len(names) > 1 else ():
            part = Result(tuple(group for group in self.groups if group.task.dataset == name), self.success_at)
            chosen[f"success/{name}"] = part.success
        return {
            **chosen,
            "success": self.success,
            "success_low": low,
            "success_high": high,
            "attempts": self.num_attempts,
        }


async def evaluate(practice: Practice, tasks: Sequence[Task], success_at: float) -> Result:
    """Attempts at every task at once; the engine decides how many run together."""
    groups = await asyncio.gather(*(practice.group(task, visit=0) for task in tasks))
    return Result(tuple(groups), success_at)
