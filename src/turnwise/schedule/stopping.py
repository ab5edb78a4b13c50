"""Why a run stops before its last step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from turnwise.types import Group

log = logging.getLogger(__name__)


class RunStopped(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


class NothingKept(RunStopped):
    """So many groups in a row were dropped that the step was given up."""

    def __init__(self, message: str, dropped: Sequence[Group]) -> None:
        super().__init__(message)
        self.dropped = tuple(dropped)
        """All groups that the step has dropped."""


class LearnerLost(RunStopped):
    """A rank of the learner has failed, and the learner with it: nothing of it can be saved any more. A resume starts
    from the last checkpoint."""

    @classmethod
    def by(cls, rank: int, reason: str) -> LearnerLost:
        """`rank` failed for `reason`. If that is a traceback, the message has its last line and the log all of it."""
        lines = reason.strip().splitlines() or ["nobody knows why"]
        if len(lines) > 1:
            log.error("rank %d of the learner failed:\n%s", rank, reason)
        return cls(f"rank {rank} of the learner failed: {lines[-1]}")
