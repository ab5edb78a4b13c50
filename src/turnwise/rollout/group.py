"""A group: several attempts at one task, run concurrently, in which a failure stays with its attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Protocol

from turnwise.engines.base import Engine, Sampling
from turnwise.engines.places import PLACE, place_of_new
from turnwise.envs.base import Environment
from turnwise.rollout.agent import play
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.limits import Limits
from turnwise.rollout.open_limit import with_open_limit
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Attempt, Play, Scene
from turnwise.rollout.table import run_game
from turnwise.types import Group, Status, Task, Trajectory

SERIALS = count()
"""Numbers for groups, in the order they start."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A group that is to be made: the `serial`-th of the run, at a task that was drawn `epoch` times before.

    Example:
        GroupRequest(Task("t-3", "hops"), epoch=0, serial=17)
    """

    task: Task
    epoch: int
    serial: int
    """Which group of the run it is: where engines take calls in order, groups come in this one."""
    losses: int = 0
    """How often the process that made it was lost. Each time its attempts begin anew, with new noise."""


class GroupMaker(Protocol):
    """Makes groups of attempts at tasks: an `AttemptMaker` here, or rollout workers elsewhere."""

    @property
    def attempts(self) -> int:
        """How many a group has."""
        ...

    async def group(self, task: Task, epoch: int) -> Group: ...


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
    seats: Mapping[str, Sequence[Engine]] = field(default_factory=dict)
    """By dataset: which engine plays each seat, if attempts are games of several seats. Attempts of `engine` are those
    of the policy; the others are not in the group."""

    def __post_init__(self) -> None:
        makers = {label: with_open_limit(make) for label, make in self.environments.items()}
        object.__setattr__(self, "environments", makers)

    @property
    def scene(self) -> Scene:
        return Scene(self.engine, self.renderer, self.sampling, self.limits)

    def opponent(self, engine: Engine) -> Scene:
        """The scene of a seat that is not trained, and needs no routes."""
        return replace(self.scene, engine=engine, sampling=replace(self.sampling, routes=None))

    async def group(self, task: Task, epoch: int) -> Group:
        """All attempts at a task, as the next group of this process."""
        return await self.group_of(GroupRequest(task, epoch, next(SERIALS)))

    async def group_of(self, request: GroupRequest) -> Group:
        """All attempts at a task. If it is a game of several seats, so many games."""
        task = request.task
        make = self.game if task.dataset in self.seats else self.single
        trajectories = list(chain(*await all_of(make(request, number) for number in range(self.attempts))))
        return Group(
            task,
            tuple(trajectory for trajectory in trajectories if trajectory.status.counts),
            tuple(trajectory for trajectory in trajectories if not trajectory.status.counts),
        )

    async def single(self, request: GroupRequest, number: int) -> list[Trajectory]:
        PLACE.set(place_of_new(request.serial, number))
        return [await self.one(request.task, request.epoch, number, request.losses)]

    def tries(self, losses: int) -> range:
        """The numbers of an attempt and its retries: those of a group that was lost are not used again."""
        first = losses * (self.retries + 1)
        return range(first, first + self.retries + 1)

    async def one(self, task: Task, epoch: int, number: int, losses: int = 0) -> Trajectory:
        """One attempt. One that failed or timed out is retried with a new environment and new noise."""
        which = Attempt(self.seed, self.split, task, epoch, number)
        for retry in self.tries(losses):
            make, make_turns = self.environments[task.dataset], self.plays.get(task.dataset, play)
            trajectory = await run_attempt(replace(which, retry=retry), make, self.scene, make_turns)
            if not is_broken(trajectory):
                break
        return trajectory

    async def game(self, request: GroupRequest, number: int) -> list[Trajectory]:
        """One game: the attempts of the seats that the policy plays. A game in which a seat failed or timed out is
        played again, with all of its seats."""
        PLACE.set(place_of_new(request.serial, number))
        task = request.task
        which, engines = Attempt(self.seed, self.split, task, request.epoch, number), self.seats[task.dataset]
        maker, scenes = (
            with_open_limit(self.environments[task.dataset]),
            [self.scene if engine is self.engine else self.opponent(engine) for engine in engines],
        )
        for retry in self.tries(request.losses):
            attempts = await run_game(replace(which, retry=retry), maker, scenes)
            if not any(map(is_broken, attempts)):
                break
        return [one for one in attempts if engines[one.seat] is self.engine]


def is_broken(trajectory: Trajectory) -> bool:
    """Whether an attempt failed or timed out, which may be otherwise the next time."""
    return trajectory.status in (Status.failed, Status.timed_out)
