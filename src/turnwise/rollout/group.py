"""A group: several attempts at one task, made at once, with failures contained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from turnwise.engines.base import Engine, Sampling
from turnwise.envs.base import Environment
from turnwise.rollout.agent import Attempt, attempt
from turnwise.rollout.limits import Limits
from turnwise.rollout.render import Renderer
from turnwise.types import Group, Status, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Practice:
    """Everything attempts need beside the task. Training, validation and demonstrations differ by these values only."""

    environments: Mapping[str, Callable[[], Environment]]
    """By dataset: makes a fresh environment."""
    engine: Engine
    renderer: Renderer
    sampling: Sampling
    limits: Limits
    seed: int
    split: str
    attempts: int
    retries: int = 0

    async def group(self, task: Task, visit: int) -> Group:
        """All attempts at a task."""
        made = await asyncio.gather(*(self.one(task, visit, number) for number in range(self.attempts)))
        return Group(
            task,
            tuple(trajectory for trajectory in made if trajectory.status.counts),
            tuple(trajectory for trajectory in made if not trajectory.status.counts),
        )

    async def one(self, task: Task, visit: int, number: int) -> Trajectory:
        """One attempt, made again with a fresh environment and fresh noise while it fails and retries are left."""
        which = Attempt(self.seed, self.split, task, visit, number)
        for retry in range(self.retries + 1):
            make = self.environments[task.dataset]
            again = replace(which, retry=retry)
            trajectory = await attempt(again, make, self.engine, self.renderer, self.sampling, self.limits)
            if trajectory.status not in (Status.failed, Status.timed_out):
                break
        return trajectory
