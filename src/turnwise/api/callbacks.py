"""Callbacks of a run: who is called at which moment, and what becomes of their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from turnwise.api.background import Background
from turnwise.evaluation.evaluator import Evaluation
from turnwise.runs.checkpoint import Checkpoint
from turnwise.training.moments import Moment, StepDone


class Answer(Enum):
    """What a callback may return besides nothing."""

    STOP = "stop"
    """Stop the run after this moment, with a checkpoint."""


STOP = Answer.STOP
"""Return it from a callback, and the run stops after this moment, with a checkpoint."""
Returned = Answer | None
OnStep = Callable[[StepDone], Returned | Awaitable[Returned]]
OnEvaluation = Callable[[Evaluation], Returned | Awaitable[Returned]]
OnCheckpoint = Callable[[Checkpoint], Returned | Awaitable[Returned]]


@dataclass(slots=True)
class Callbacks:
    """The callbacks of one run. An error in one stops the run as STOP does, and is kept."""

    background: Background[Any]
    on_step: OnStep | None = None
    on_evaluation: OnEvaluation | None = None
    on_checkpoint: OnCheckpoint | None = None
    errors: list[Exception] = field(default_factory=list)
    is_stopped: bool = False
    """Whether a callback has asked for it."""

    async def tell(self, moment: Moment) -> None:
        if isinstance(moment, Checkpoint):
            self.background.has_something_to_lose = True
        callback = self.callback_for(moment)
        if callback is None or self.errors:
            return
        try:
            answer = await self.background.call(callback, moment)
            if answer not in (None, STOP):
                raise ValueError(f"a callback returns None or turnwise.STOP, got {type(answer).__name__}")
        except Exception as error:
            self.errors.append(error)
            answer = STOP
        if answer is STOP:
            self.is_stopped = True
            self.background.stop.set()

    def callback_for(self, moment: Moment) -> Callable[[Any], Any] | None:
        if isinstance(moment, StepDone):
            return self.on_step
        return self.on_evaluation if isinstance(moment, Evaluation) else self.on_checkpoint
