"""The values that every attempt gets: which attempt it is, what it shares with others, and its own state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from turnwise.engines.base import Engine, Sampling
from turnwise.envs.base import Environment
from turnwise.rollout.attempt_log import AttemptLog
from turnwise.rollout.deadline import Deadline
from turnwise.rollout.limits import Limits
from turnwise.rollout.render.renderer import Renderer
from turnwise.seeds import seed_of
from turnwise.types import Status, Task


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt this is. Its sampling noise depends on these values and on nothing else.

    Example:
        Attempt(seed=0, split="train", task=task, epoch=2, number=5, retry=0)
    """

    seed: int
    split: str
    task: Task
    epoch: int = 0
    """How many times the task was drawn before."""
    number: int = 0
    """Index in the group; in a game of several seats the number of the game."""
    retry: int = 0
    seat: int = 0
    """Which side of the game."""

    def noise(self, turn: int) -> int:
        """The seed for sampling a turn."""
        seat = (self.seat,) if self.seat else ()
        return seed_of(
            self.seed, self.split, self.task.dataset, self.task.id, self.epoch, self.number, self.retry, turn, *seat
        )

    @property
    def session(self) -> str:
        """A name for logs and engines, unique in a run."""
        seat = f"/seat {self.seat}" if self.seat else ""
        return f"{self.split}/{self.task.dataset}/{self.task.id}/{self.epoch}/{self.number}/{self.retry}{seat}"


@dataclass(frozen=True, slots=True)
class Scene:
    """What attempts share: the model, how it is prompted and sampled, and the limits.

    Example:
        Scene(engine, renderer, Sampling(max_tokens=200), limits)
    """

    engine: Engine
    renderer: Renderer
    sampling: Sampling
    limits: Limits


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """One attempt while it runs: its identity, its environment, its deadline and its log."""

    attempt: Attempt
    environment: Environment
    deadline: Deadline
    log: AttemptLog


class Play(Protocol):
    """Makes the turns of an attempt: opens the environment, adds turns to the log, and returns how the attempt ended.
    The agent loop is one (`rollout.agent.play`), an agent behind the endpoint is another."""

    async def __call__(self, scene: Scene, running: RunningAttempt) -> Status: ...
