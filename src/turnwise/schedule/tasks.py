"""The order in which tasks are drawn: a pure function of the seed and of how many were drawn before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from turnwise.seeds import seed_of
from turnwise.types import Task


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

    def skip(self, count: int) -> None:
        """Skip tasks that an earlier part of the run has used."""
        ...

    def metrics(self, num_draws: int) -> dict[str, float]:
        """What is known of the tasks after that many draws."""
        ...


class TaskOrder:
    """Datasets mixed by weight, each reshuffled every time it is exhausted.

    Example:
        TaskOrder({"hops": tasks}, {"hops": 1.0}, seed=0).draw()
    """

    def __init__(self, datasets: Mapping[str, Sequence[Task]], weights: Mapping[str, float], seed: int) -> None:
        for name, tasks in datasets.items():
            if not tasks:
                raise ValueError(f"the dataset {name} has no tasks")
        self.datasets = datasets
        self.weights = weights
        self.seed = seed
        self.number = 0
        self.drawn = dict.fromkeys(datasets, 0)
        self.orders: dict[str, tuple[int, np.ndarray]] = {}

    def draw(self) -> Draw:
        """The next task, from the dataset that is furthest behind its share, so that all parts of a run are mixed."""
        name = min(self.datasets, key=lambda name: (self.drawn[name] + 0.5) / self.weights[name])
        epoch, index = divmod(self.drawn[name], len(self.datasets[name]))
        draw = Draw(self.number, self.datasets[name][self.order(name, epoch)[index]], epoch)
        self.drawn[name] += 1
        self.number += 1
        return draw

    def skip(self, count: int) -> None:
        """Skip tasks that an earlier part of the run has used."""
        for _ in range(count):
            self.draw()

    def metrics(self, num_draws: int) -> dict[str, float]:
        """How many tasks there are, and how often that many draws use each task of the most used dataset."""
        total = sum(self.weights[name] for name in self.datasets)
        epochs = [self.weights[name] / total * num_draws / len(tasks) for name, tasks in self.datasets.items()]
        return {"tasks/distinct": float(sum(map(len, self.datasets.values()))), "tasks/epochs": max(epochs)}

    def order(self, name: str, epoch: int) -> np.ndarray:
        if self.orders.get(name, (-1,))[0] != epoch:
            random = np.random.default_rng(seed_of(self.seed, "order", name, epoch))
            self.orders[name] = epoch, random.permutation(len(self.datasets[name]))
        return self.orders[name][1]
