"""Attempts that other systems can train on: those that no grammar guided."""

from __future__ import annotations

from turnwise.types import Trajectory


def unguided(attempt: Trajectory, system: str) -> Trajectory:
    """The attempt itself; ValueError where a grammar guided a turn. Another system would compute the logprobs of its
    tokens among all tokens, and take the difference for a change of the policy."""
    if any(turn.allowed is not None for turn in attempt.turns):
        raise ValueError(f"{system} has no place for what a grammar allowed; leave out attempts with structured output")
    return attempt
