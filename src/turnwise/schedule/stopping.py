"""Why a run stops before its last step."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class RunStopped(RuntimeError):
    """The run cannot go on; the message says why and what to do."""


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
