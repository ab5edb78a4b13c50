"""Fairness: whether trained attempts are as long as sampled ones, or short attempts are favoured."""

from __future__ import annotations

import math
from collections.abc import Iterable

from turnwise.types import Group, Trajectory


class AttemptTally:
    """Sums over attempts."""

    def __init__(self) -> None:
        self.attempts = 0
        self.turns = 0
        self.seconds = 0.0

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            self.attempts += 1
            self.turns += len(trajectory.turns)
            self.seconds += sum(
                turn.timing.queued + turn.timing.prefill + turn.timing.decode + turn.timing.environment
                for turn in trajectory.turns
            )

    def mean(self, total: float) -> float:
        return total / self.attempts if self.attempts else math.nan


class Fairness:
    """Mean turns and seconds of trained attempts, divided by those of sampled attempts, over the run so far.

    Example:
        fairness.metrics()["fair/turns"]   1 if neither long nor short attempts are favoured
    """

    def __init__(self) -> None:
        self.of_sampled, self.of_trained = AttemptTally(), AttemptTally()

    def sampled(self, group: Group) -> None:
        self.of_sampled.add(group.trajectories)

    def trained(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.of_trained.add(group.trajectories)

    def metrics(self) -> dict[str, float]:
        sampled, trained = self.of_sampled, self.of_trained
        turns, seconds = sampled.mean(sampled.turns), sampled.mean(sampled.seconds)
        return {
            "fair/turns": trained.mean(trained.turns) / turns if turns else math.nan,
            "seconds/trained_over_sampled": trained.mean(trained.seconds) / seconds if seconds else math.nan,
        }
