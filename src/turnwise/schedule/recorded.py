"""Recorded groups in the place of sampled ones: the stream draws them in the order of the run that recorded them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from turnwise.runs.archive import Record
from turnwise.runs.recorded_archive import RecordedArchive
from turnwise.schedule.resting import Heard
from turnwise.schedule.stopping import RunStopped
from turnwise.schedule.tasks import Draw
from turnwise.types import Group, Trajectory


class RecordedGroups:
    """The groups of a recorded run, one by one: its draws, and what makes a group of a draw.

    The archive has the groups of a step that were trained on before those that were dropped. Here the dropped ones are
    spread before the others, so that the last group of a step is one that trains. A loop that drops the same groups
    then takes the same steps.

    Example:
        groups = RecordedGroups(RecordedArchive.open("runs/quickstart"), check)
        group = await groups.make_group(groups.draw())
    """

    def __init__(self, source: RecordedArchive, check: Callable[[Group], None]) -> None:
        """`check` raises ValueError for a group that the model cannot compute."""
        self.source = source
        self.check = check
        self.steps = iter(source.steps)
        self.age = source.steps[0] - 1
        """Version of the weights that the first recorded step trained: the replay calls them version 0."""
        self.left: deque[Group] = deque()
        self.drawn: dict[int, Group] = {}
        """By the number of their draw: groups that were drawn and not made yet."""
        self.number = 0

    def draw(self) -> Draw:
        """The task of the next recorded group. RunStopped after the last one."""
        while not self.left:
            self.read_next_step()
        group = self.left.popleft()
        try:
            self.check(group)
        except ValueError as error:
            raise RunStopped(f"task {group.task.id} of {self.source.folder.path} cannot be replayed: {error}") from None
        draw = Draw(self.number, group.task, 0)
        self.drawn[draw.number] = group
        self.number += 1
        return draw

    def read_next_step(self) -> None:
        step = next(self.steps, None)
        if step is None:
            raise RunStopped(
                f"all {self.number} groups that {self.source.folder.path} recorded have been drawn; set steps to the "
                "number of steps that they suffice for"
            )
        try:
            records = self.source.read(step)
        except ValueError as error:
            raise RunStopped(str(error)) from None
        self.left.extend(with_age(group, self.age) for group in in_drawing_order(records))

    def skip(self, count: int, heard: Sequence[Heard] = ()) -> None:
        for _ in range(count):
            del self.drawn[self.draw().number]

    def hear(self, groups: Sequence[Group]) -> Sequence[Heard]:
        """Nothing: the order is the recorded one, whatever comes of it."""
        return ()

    def metrics(self, num_draws: int) -> dict[str, float]:
        """Nothing: the archive does not say how many tasks there were."""
        return {}

    async def make_group(self, draw: Draw) -> Group:
        """The recorded group of a draw. It never waits, so groups finish in the order they started."""
        return self.drawn.pop(draw.number)


def in_drawing_order(records: Sequence[Record]) -> list[Group]:
    """The groups of a step, those that were dropped spread before those that were kept."""
    kept = [record.group for record in records if record.kept]
    dropped = [record.group for record in records if not record.kept]
    if not kept:
        return dropped
    ends = np.linspace(0, len(dropped), len(kept) + 1).round().astype(int).tolist()
    return [
        group
        for place, group_kept in enumerate(kept)
        for group in (*dropped[ends[place] : ends[place + 1]], group_kept)
    ]


def with_age(group: Group, age: int) -> Group:
    """The group with the versions of its tokens counted from another one."""
    if not age:
        return group
    return Group(
        group.task,
        tuple(aged(trajectory, age) for trajectory in group.trajectories),
        tuple(aged(trajectory, age) for trajectory in group.failed),
    )


def aged(trajectory: Trajectory, age: int) -> Trajectory:
    return replace(trajectory, turns=tuple(replace(turn, versions=turn.versions - age) for turn in trajectory.turns))
