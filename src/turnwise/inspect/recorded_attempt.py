"""One attempt as it was recorded, with the credit and the token weights that it trained with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from turnwise.runs.archive import Record
from turnwise.tokens import Floats, extends
from turnwise.types import Task, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class RecordedAttempt:
    """An attempt of a group that was trained on, dropped, or evaluated."""

    task: Task
    trajectory: Trajectory
    trained: bool
    credit: tuple[Floats, ...]
    """[A] per turn; empty where the attempt did not train."""
    token_weights: tuple[Floats, ...]
    """[A] per turn; empty where the attempt did not train."""
    learner_logprobs: tuple[Floats, ...] = ()
    """[A] per turn, before the step's first update; empty where the run did not record them."""
    entropies: tuple[Floats, ...] = ()
    """[A] per turn; empty where the run did not record them."""

    @classmethod
    def of_record(cls, record: Record, attempt: int) -> RecordedAttempt:
        """The attempt with a number: those that count come first."""
        group = record.group
        attempts = (*group.trajectories, *group.failed)
        if not 0 <= attempt < len(attempts):
            raise ValueError(f"task {group.task.id} has attempts 0 to {len(attempts) - 1} here, not {attempt}")
        start = sum(len(trajectory.turns) for trajectory in attempts[:attempt])
        trained = record.kept and attempt < len(group.trajectories)
        place = slice(start, start + len(attempts[attempt].turns)) if trained else slice(0, 0)
        arrays = record.credit, record.weights, record.learner_logprobs, record.entropies
        return cls(group.task, attempts[attempt], trained, *(values[place] for values in arrays))

    @property
    def new_from(self) -> tuple[int, ...]:
        """Per turn: the tokens of its prompt that the turn before had already, prompt and action."""
        turns = self.trajectory.turns
        known = [
            len(before.prompt) + len(before.action) if extends(turn, before) else 0 for before, turn in pairwise(turns)
        ]
        return (0, *known)[: len(turns)]
