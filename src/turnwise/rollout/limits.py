"""Limits of an attempt, enforced by the agent loop on the values that are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from turnwise.messages import Message, ToolSpec

BYTES_PER_TOKEN = 16
"""A text that fits has fewer on average: English has about five; only lines of dashes and the like have more."""
FEWEST_BYTES = 1 << 16
"""A text up to this size is always tokenised, however few tokens are allowed."""
SHOWN_OF_LARGE = 2000
"""Characters that are recorded of a text too large to be tokenised."""


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
    call_seconds: float = 120.0
    """For one model call and for one environment call."""
    attempt_seconds: float = 1800.0
    grace: float = 5.0
    """Seconds that an environment may take to return after its deadline or cancellation, before it is left behind."""
    max_observation_bytes: int = 0
    """Limit for the text of one observation before it is tokenised; 0: derived from max_prompt_tokens."""

    @property
    def observation_bytes(self) -> int:
        return self.max_observation_bytes or largest_text(self.max_prompt_tokens)

    def room_for_action(self, prompt_tokens: int, context: int) -> int:
        """How many tokens may be sampled after a prompt; 0 if the prompt itself does not fit."""
        if prompt_tokens > self.max_prompt_tokens:
            return 0
        return max(0, min(self.max_action_tokens, self.max_trajectory_tokens - prompt_tokens, context - prompt_tokens))


def largest_text(tokens: int) -> int:
    """Bytes of the largest text that is worth tokenising if that many tokens fit."""
    return max(FEWEST_BYTES, BYTES_PER_TOKEN * tokens)


def text_bytes(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
    """Bytes of all texts in messages and tools, plus a few for each text."""
    texts = [text for said in messages for text in (said.role, said.content, said.thinking)]
    texts += [text for said in messages for call in said.calls for text in (call.name, call.text)]
    texts += [text for tool in tools for text in (tool.name, tool.description, tool.text)]
    return sum(map(num_bytes, texts)) + 8 * len(texts)


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def abridged(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The beginning of messages that are too large to keep, with a note about the rest."""
    kept = []
    left = SHOWN_OF_LARGE
    for message in messages:
        if left <= 0:
            break
        note = f" [... {num_bytes(message.content)} bytes in all, more than rollout.limits.max_observation_bytes]"
        content = message.content if len(message.content) <= left else message.content[:left] + note
        kept.append(replace(message, content=content, thinking=message.thinking[:left], calls=()))
        left -= len(message.content) + 50
    return tuple(kept)
