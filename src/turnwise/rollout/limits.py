"""Limits of an attempt, enforced by the agent loop on the values that are sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one attempt.

    Example:
        Limits(max_turns=8, max_prompt_tokens=4096, max_action_tokens=500, max_trajectory_tokens=4596)
    """

    max_turns: int
    max_prompt_tokens: int
    max_action_tokens: int
    max_trajectory_tokens: int
    """Prompt and action of one call together."""
    turn_seconds: float = 120.0
    """For one model call and for one environment call."""
    attempt_seconds: float = 1800.0
    grace: float = 5.0
    """Seconds that an environment has to come back after its deadline or its cancellation, before it is left behind."""

    def room_for_action(self, prompt_tokens: int, context: int) -> int:
        """How many tokens may be sampled after a prompt; 0 where the prompt itself does not fit."""
        if prompt_tokens > self.max_prompt_tokens:
            return 0
        return max(0, min(self.max_action_tokens, self.max_trajectory_tokens - prompt_tokens, context - prompt_tokens))
