"""How attempts are made and sampled."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Choice, Section


class RolloutConfig(Section):
    """How attempts are made."""

    group_size: int = Field(8, ge=1)
    """Attempts per task: the size of a group."""
    history: Literal["extend", "rerender", "managed"] = "extend"
    """extend keeps the exact tokens so far and appends; rerender applies the chat template anew each turn; managed
    shows what the environment hands over, which it must do every turn."""
    tools: Literal["none", "hermes", "llama", "harmony"] = "none"
    """How the model writes tool calls, which environments then get as structure; none leaves messages plain text."""
    trust_text: bool = False
    """Whether control tokens that the text of a message spells, <|im_end|> for one, become those tokens. By default
    they stay text: whoever can write into a prompt could forge a turn otherwise."""
    max_turns: int = Field(8, ge=1)
    """Model calls per attempt."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Longest prompt that is sent; a longer one ends the attempt."""
    max_action_tokens: int = Field(512, ge=1)
    """Longest action; less where the context ends earlier."""
    max_trajectory_tokens: int = Field(4608, ge=2)
    """Longest conversation: prompt and action of one call together."""
    max_observation_bytes: int = Field(0, ge=0)
    """Largest observation, in bytes of text before it is tokenised; a larger one ends the attempt as
    observation_too_large. 0 is 16 for every token of max_prompt_tokens, and 65536 at least."""
    turn_seconds: float = Field(120.0, gt=0)
    """Deadline of one model call and of one environment call."""
    attempt_seconds: float = Field(1800.0, gt=0)
    """Deadline of a whole attempt."""
    blocked_seconds: float = Field(60.0, gt=0)
    """Seconds for which a coroutine of an environment may hold up the event loop, computing or blocking without an
    await, before it is interrupted and its attempt has timed out. Plain functions run in threads and hold up nobody."""
    retries: int = Field(1, ge=0)
    """How often a failed or timed-out attempt is made again with a fresh environment."""
    min_attempts: int = Field(2, ge=1)
    """A group with fewer attempts that count is dropped and replaced."""
    on_failure: Choice = Choice(name="drop")
    """What becomes of attempts that failed for good: drop leaves them out, pay counts them as paid its value."""
    truncated: Literal["train", "mask", "zero"] = "train"
    """Attempts cut short train with what they earned, train not at all, or count as paid nothing."""
    success_threshold: float = 1.0
    """An attempt has succeeded when its total reward is at least this."""

    @model_validator(mode="after")
    def limits_fit(self) -> Self:
        if self.min_attempts > self.group_size:
            raise ValueError(f"min_attempts = {self.min_attempts} can never be met with group_size = {self.group_size}")
        if self.max_prompt_tokens >= self.max_trajectory_tokens:
            raise ValueError("max_prompt_tokens must leave room for an action within max_trajectory_tokens")
        return self


class SamplingConfig(Section):
    """How training attempts are sampled. Top-p, top-k and penalties are for evaluation only: the learner could not
    reproduce their logprobs."""

    temperature: float = Field(1.0, ge=1e-6, le=1e6)
    """Logits are divided by it, by the engine and by the learner alike."""
