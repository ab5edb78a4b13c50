"""The order in which tasks are drawn: a pure function of the seed, of how many were drawn before and, where tasks rest,
of what was heard of them by then."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from turnwise.schedule.resting import Heard, Rests, heard_of
from turnwise.seeds import seed_of
from turnwise.types import Group, Task


@dataclass(frozen=True, slots=True)
class Draw:
    """A task to attempt: the `number`-th of the run, drawn `epoch` times before."""

    number: int
    task: Task
    epoch: int


class Draws(Protocol):
    """Tasks in an order."""

    def draw(self) -> Draw:
        """The next task."""
        ...

    def skip(self, count: int, heard: Sequence[Heard] = ()) -> None:
        """Skip tasks that an earlier part of the run has used, in the order that it drew them after what it heard."""
        ...

    def hear(self, groups: Sequence[Group]) -> Sequence[Heard]:
        """Learn what came of attempts. Returns all that has to be remembered of it, in a checkpoint."""
        ...

    def metrics(self, num_draws: int) -> dict[str, float]:
        """What is known of the tasks after that many draws."""
        ...


class FixedTasks:
    """A dataset that is gone through again and again, in a new order each time, without tasks that rest."""

    def __init__(self, name: str, tasks: Sequence[Task], seed: int, max_rest: int = 0) -> None:
        if not tasks:
            raise ValueError(f"the dataset {name} has no tasks")
        self.name = name
        self.tasks = tasks
        self.seed = seed
        self.rests = Rests(max_rest)
        self.num_passed_over = 0
        self.shuffled: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def visit(self, number: int) -> tuple[Task, int]:
        """(the task of the `number`-th visit, the rounds before this one). Visits are made in order."""
        task, epoch = self.met(number + self.num_passed_over)
        while self.rests.passes_over(task.id):
            self.num_passed_over += 1
            task, epoch = self.met(number + self.num_passed_over)
        return task, epoch

    def met(self, place: int) -> tuple[Task, int]:
        """(the task at a place of the order that nothing rests in, the rounds before this one)."""
        epoch, index = divmod(place, len(self.tasks))
        if self.shuffled[0] != epoch:
            random = np.random.default_rng(seed_of(self.seed, "order", self.name, epoch))
            self.shuffled = epoch, random.permutation(len(self.tasks))
        return self.tasks[self.shuffled[1][index]], epoch

    def num_distinct(self, num_visits: float) -> int:
        return len(self.tasks)


@dataclass(slots=True)
class FreshTasks:
    """A dataset that draws a new task for every visit: the task is a function of the number of the visit alone.

    Example:
        FreshTasks(lambda number: Task(f"a-{number}", "a")).visit(7)
    """

    draw: Callable[[int], Task]
    """The task of a visit, by its number."""
    visits: dict[str, int] = field(default_factory=dict)
    """How often each task was visited: small worlds draw the same again."""
    firsts: list[int] = field(default_factory=list)
    """The visits at which a task was new."""

    def visit(self, number: int) -> tuple[Task, int]:
        """(the task of the `number`-th visit, how often the same was drawn before). Visits are made in order."""
        task = self.draw(number)
        before = self.visits.get(task.id, 0)
        self.visits[task.id] = before + 1
        if not before:
            self.firsts.append(number)
        return task, before

    def num_distinct(self, num_visits: float) -> int:
        return bisect_left(self.firsts, num_visits)


class TaskOrder:
    """Datasets mixed by weight. One of fixed tasks is reshuffled every time it is exhausted, and its tasks may rest,
    for `max_rest` rounds at most (see `Rests`).

    Example:
        TaskOrder({"hops": tasks}, {"hops": 1.0}, seed=0).draw()
    """

    def __init__(
        self,
        datasets: Mapping[str, Sequence[Task] | FreshTasks],
        weights: Mapping[str, float],
        seed: int,
        max_rest: int = 0,
    ) -> None:
        self.datasets = {
            name: tasks if isinstance(tasks, FreshTasks) else FixedTasks(name, tasks, seed, max_rest)
            for name, tasks in datasets.items()
        }
        self.weights = weights
        self.max_rest = max_rest
        self.heard: list[Heard] = []
        self.recalled: deque[Heard] = deque()
        """What an earlier part of the run heard, and this one has not come to yet."""
        self.number = 0
        self.drawn = dict.fromkeys(datasets, 0)

    def draw(self) -> Draw:
        """The next task, from the dataset that is furthest behind its share, so that all parts of a run are mixed."""
        while self.recalled and self.recalled[0].draws <= self.number:
            self.remember(self.recalled.popleft())
        name = min(self.datasets, key=lambda name: (self.drawn[name] + 0.5) / self.weights[name])
        task, epoch = self.datasets[name].visit(self.drawn[name])
        draw = Draw(self.number, task, epoch)
        self.drawn[name] += 1
        self.number += 1
        return draw

    def skip(self, count: int, heard: Sequence[Heard] = ()) -> None:
        """Skip tasks that an earlier part of the run has used, in the order that it drew them after what it heard.
        Draws that it had made beyond these come again as they were."""
        self.recalled.extend(heard)
        for _ in range(count):
            self.draw()

    def hear(self, groups: Sequence[Group]) -> Sequence[Heard]:
        """Let tasks rest at which all attempts of a group were paid alike. Returns all that was heard so far."""
        if self.max_rest:
            for heard in heard_of(groups, self.number):
                self.remember(heard)
        return [*self.heard, *self.recalled]

    def remember(self, heard: Heard) -> None:
        self.heard.append(heard)
        tasks = self.datasets[heard.dataset]
        if isinstance(tasks, FixedTasks):
            tasks.rests.hear(heard.task, differed=heard.differed)

    def metrics(self, num_draws: int) -> dict[str, float]:
        """How many tasks there are, or were drawn where each visit draws a new one, and how often that many draws use
        each task of the most used dataset. With tasks that rest, how many do now."""
        total = sum(self.weights[name] for name in self.datasets)
        visits = {name: self.weights[name] / total * num_draws for name in self.datasets}
        distinct = {name: tasks.num_distinct(visits[name]) for name, tasks in self.datasets.items()}
        epochs = max(visits[name] / max(1, distinct[name]) for name in self.datasets)
        found = {"tasks/distinct": float(sum(distinct.values())), "tasks/epochs": epochs}
        if self.max_rest:
            fixed = [tasks for tasks in self.datasets.values() if isinstance(tasks, FixedTasks)]
            found["tasks/resting"] = float(sum(len(tasks.rests.left) for tasks in fixed))
        return found
