"""The moments of a run that others may want to hear of: a step, an evaluation, a checkpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from turnwise.evaluation.evaluator import Evaluation
from turnwise.runs.archive import Record
from turnwise.runs.checkpoint import Checkpoint
from turnwise.types import Group


@dataclass(frozen=True, slots=True, eq=False)
class StepDone:
    """A step of training, once it is recorded.

    Example:
        StepDone(12, {"reward/mean": 0.5, "loss": 0.01}, records)
    """

    step: int
    metrics: Mapping[str, float]
    """What metrics.jsonl has of this step."""
    records: tuple[Record, ...]
    """Every group that was sampled for it, with credit and token weights where it was trained on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))

    def __repr__(self) -> str:
        return f"StepDone(step {self.step}, {len(self.kept)} groups kept, {len(self.dropped)} dropped)"

    @property
    def kept(self) -> tuple[Group, ...]:
        """The groups that were trained on."""
        return tuple(record.group for record in self.records if record.kept)

    @property
    def dropped(self) -> tuple[Group, ...]:
        """The groups that the filter left out."""
        return tuple(record.group for record in self.records if not record.kept)


Moment = StepDone | Evaluation | Checkpoint
Tell = Callable[[Moment], Awaitable[None]]
"""Told of each moment, one after the other, while the run waits. It does not raise: a run that should stop is asked to
by its `stop`."""


async def nobody(moment: Moment) -> None:
    """Nobody listens."""
