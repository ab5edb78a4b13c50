"""The environments of a recipe, by dataset: how attempts at its tasks get one, and who makes their turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from turnwise.envs.base import Environment
from turnwise.rollout.batching.joined import joined_reports
from turnwise.rollout.batching.microbatch import Lane
from turnwise.rollout.environment_host import EnvironmentHost
from turnwise.rollout.failures import Failures
from turnwise.rollout.open_limit import EnvironmentMaker, OpenLimit
from turnwise.rollout.scene import Play
from turnwise.types import Task

DEMONSTRATED = "demonstrated"
"""In place of a split: the training tasks that are demonstrated, which may be easier than the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEnvironments:
    """The environments of one dataset."""

    make: Callable[[], Environment]
    """Makes a fresh one with the recipe's settings."""
    make_heldout: Callable[[], Environment]
    """Makes a fresh one for held-out attempts and demonstrations, which have one seat."""
    draw: Callable[[str, int | None], list[Task]]
    """(split or DEMONSTRATED, count) -> that many of its tasks, or all."""
    host: EnvironmentHost
    """Where they live, and how their calls are put together."""
    open_limit: OpenLimit
    """How many may be alive at once."""
    training: Lane
    validation: Lane
    play: Play | None = None
    """The agent that makes the turns through the endpoint; None where the agent loop does."""


class Environments:
    """All environments of a run. One object serves demonstrations, training and evaluation.

    Example:
        environments = Environments({"hops": entry}, failures)
        makers = environments.training()
        environments.tasks("heldout", 128)
    """

    def __init__(
        self, datasets: Mapping[str, DatasetEnvironments], failures: Failures, *, validation_overlaps: bool = False
    ) -> None:
        self.datasets = datasets
        self.failures = failures
        """How their attempts fail."""
        self.validation_overlaps = validation_overlaps
        self.reported: list[Mapping[str, float]] = []
        """Reports of rollout workers, which have environments like these."""
        self.drawn: dict[tuple[str, int | None], dict[str, list[Task]]] = {}

    def training(self) -> dict[str, EnvironmentMaker]:
        """Fresh environments for training attempts, by dataset."""
        return {label: each.host.wrap(each.make, each.training) for label, each in self.datasets.items()}

    def validation(self) -> dict[str, EnvironmentMaker]:
        """Fresh environments for held-out attempts, by dataset. Validation that overlaps training takes half of the
        permits, so that its many attempts never keep training waiting."""
        makers = {label: each.host.wrap(each.make_heldout, each.validation) for label, each in self.datasets.items()}
        if not self.validation_overlaps:
            return makers
        halves = {id(maker.open_limit): maker.open_limit.half() for maker in makers.values()}
        return {label: replace(maker, open_limit=halves[id(maker.open_limit)]) for label, maker in makers.items()}

    def demonstrating(self) -> dict[str, EnvironmentMaker]:
        """Fresh environments whose calls are made one by one, by dataset."""
        return {
            label: EnvironmentMaker(each.make_heldout, each.open_limit, self.failures)
            for label, each in self.datasets.items()
        }

    @property
    def plays(self) -> dict[str, Play]:
        """The agents that make turns, by dataset; datasets that the agent loop plays are not in it."""
        return {label: each.play for label, each in self.datasets.items() if each.play is not None}

    def tasks(self, split: str, count: int | None = None) -> dict[str, list[Task]]:
        """The tasks of a split, by dataset, at most `count` of each. ValueError where a dataset has none."""
        if (split, count) not in self.drawn:
            self.drawn[split, count] = {label: each.draw(split, count) for label, each in self.datasets.items()}
        return self.drawn[split, count]

    def report(self) -> dict[str, float]:
        """How calls of environments were put together since the last report, here and in rollout workers, as
        metrics."""
        own = {
            f"batch/{label}/{key}": value
            for label, each in self.datasets.items()
            for key, value in each.host.report().items()
        }
        others, self.reported = self.reported, []
        return joined_reports([*others, own]) if others else own

    def close(self) -> None:
        for each in self.datasets.values():
            each.host.close()
