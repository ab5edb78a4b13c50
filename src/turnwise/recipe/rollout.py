"""How attempts are made and sampled."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Choice, Section


class RolloutLimitsConfig(Section):
    """Time-outs, and the size of an observation. Open it when attempts end as timed_out or observation_too_large."""

    in_short_list = ()

    call_seconds: float = Field(120.0, gt=0)
    """Time-out of one model call and of one environment call, in seconds."""
    attempt_seconds: float = Field(1800.0, gt=0)
    """Time-out of a whole attempt, in seconds."""
    blocked_seconds: float = Field(60.0, gt=0)
    """Seconds for which a coroutine of an environment may block the event loop before it is interrupted and its attempt
    has timed out; plain functions run in threads and block nobody."""
    max_observation_bytes: int = Field(0, ge=0)
    """Largest observation, in bytes of text before it is tokenised; a larger one ends the attempt as
    observation_too_large. 0 takes 16 for every token of max_prompt_tokens, and 65536 at least."""


class RolloutFailuresConfig(Section):
    """What happens to attempts that failed or were cut short. Open it when `failure/rate` is above 0, or when many
    attempts end as too_many_turns or too_long."""

    in_short_list = ()

    retries: int = Field(1, ge=0)
    """How often a failed or timed-out attempt is made again, with a fresh environment."""
    min_attempts: int = Field(2, ge=1)
    """A group with fewer attempts that count is dropped and replaced."""
    on_failure: Choice = Choice(name="drop")
    """What happens to attempts that failed for good: name = "drop" leaves them out, name = "pay" counts them with the
    total reward `value`."""
    on_truncation: Literal["train", "mask", "zero"] = "train"
    """What happens to attempts that were cut short: train uses them with what they earned, mask gives their tokens no
    weight, zero takes their rewards away."""


class RenderingConfig(Section):
    """How messages become tokens. Open it when texts that you trust have to spell control tokens."""

    in_short_list = ()

    trust_text: bool = False
    """Whether control tokens that the text of a message spells, for instance <|im_end|>, become those tokens. By
    default they stay text: otherwise whoever can write into a prompt could forge a turn."""


class RolloutConfig(Section):
    """How attempts are made."""

    group_size: int = Field(8, ge=1)
    """Attempts per task."""
    history: Literal["extend", "rerender", "managed"] = "extend"
    """How the next prompt is made: extend keeps the exact tokens so far and appends; rerender applies the chat template
    to all messages again; managed takes the messages that the environment returns each turn."""
    tools: str = "none"
    """Format of tool calls, which environments then get parsed. auto finds the one that the chat template writes;
    otherwise its name, or module:Parser for one of your own. none leaves messages as plain text."""
    max_turns: int = Field(8, ge=1)
    """Model calls per attempt."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Longest prompt that is sent; a longer one ends the attempt."""
    max_action_tokens: int = Field(512, ge=1)
    """Longest action; the end of the context may cut it shorter."""
    max_trajectory_tokens: int = Field(4608, ge=2)
    """Longest conversation: prompt and action of one call together."""
    success_threshold: float = 1.0
    """An attempt has succeeded when its total reward is at least this."""
    limits: RolloutLimitsConfig = RolloutLimitsConfig()
    """Time-outs, and the size of an observation."""
    failures: RolloutFailuresConfig = RolloutFailuresConfig()
    """What happens to attempts that failed or were cut short."""
    rendering: RenderingConfig = RenderingConfig()
    """How messages become tokens."""

    @model_validator(mode="after")
    def limits_fit(self) -> Self:
        if self.failures.min_attempts > self.group_size:
            raise ValueError(
                f"failures.min_attempts = {self.failures.min_attempts} can never be met with group_size = "
                f"{self.group_size}"
            )
        if self.max_prompt_tokens >= self.max_trajectory_tokens:
            raise ValueError("max_prompt_tokens must leave room for an action within max_trajectory_tokens")
        return self


class SamplingConfig(Section):
    """How training attempts are sampled. Top-p, top-k and penalties are for evaluation only: the learner could not
    reproduce their logprobs."""

    temperature: float = Field(1.0, ge=1e-6, le=1e6)
    """Temperature by which the engine and the learner divide logits."""
