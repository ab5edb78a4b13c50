"""A group: several attempts at one task, run concurrently, in which a failure stays with its attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from turnwise.engines.base import Engine, Sampling
from turnwise.envs.base import Environment
from turnwise.rollout.agent import play
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.limits import Limits
from turnwise.rollout.open_limit import with_open_limit
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Attempt, Play, Scene
from turnwise.types import Group, Status, Task, Trajectory

Result = TypeVar("Result")


async def all_of(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of coroutines that run concurrently. All of them have ended when this returns or raises, also when it
    is cancelled: an attempt may have an environment to close."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            if not task.cancelling():  # a second cancellation would interrupt the closing of its environment
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class AttemptMaker:
    """Makes attempts and groups of attempts at tasks. Training and validation differ by these values only."""

    environments: Mapping[str, Callable[[], Environment]]
    """By dataset: makes a new environment. A maker without a limit on open environments gets the default limit."""
    engine: Engine
    renderer: Renderer
    sampling: Sampling
    limits: Limits
    seed: int
    split: str
    attempts: int
    retries: int = 0
    plays: Mapping[str, Play] = field(default_factory=dict)
    """By dataset: what makes the turns, if that is not the agent loop."""

    def __post_init__(self) -> None:
        makers = {label: with_open_limit(make) for label, make in self.environments.items()}
        object.__setattr__(self, "environments", makers)

    @property
    def scene(self) -> Scene:
        return Scene(self.engine, self.renderer, self.sampling, self.limits)

    async def group(self, task: Task, epoch: int) -> Group:
        """All attempts at a task."""
        trajectories = await all_of(self.one(task, epoch, number) for number in range(self.attempts))
        return Group(
            task,
            tuple(trajectory for trajectory in trajectories if trajectory.status.counts),
            tuple(trajectory for trajectory in trajectories if not trajectory.status.counts),
        )

    async def one(self, task: Task, epoch: int, number: int) -> Trajectory:
        """One attempt. One that failed or timed out is retried with a new environment and new noise."""
        which = Attempt(self.seed, self.split, task, epoch, number)
        for retry in range(self.retries + 1):
            make, make_turns = self.environments[task.dataset], self.plays.get(task.dataset, play)
            trajectory = await run_attempt(replace(which, retry=retry), make, self.scene, make_turns)
            if trajectory.status not in (Status.failed, Status.timed_out):
                break
        return trajectory
