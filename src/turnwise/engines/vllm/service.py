"""The border to a vLLM that runs: a call and its answer, whichever way they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.types import TurnTiming
from turnwise.weights.vllm_transfer import Control


@dataclass(frozen=True, slots=True)
class Call:
    """One request to vLLM.

    Example:
        Call("8f1c", [1, 17, 4], {"max_tokens": 64, "temperature": 1.0}, salt="3", session="train/hops/7/0/2/0")
    """

    name: str
    """By which it can be aborted."""
    prompt: list[int]
    sampling: Mapping[str, Any]
    """As vLLM's SamplingParams call it."""
    salt: str
    """Prefixes are shared between calls of the same salt only."""
    session: str


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens from `start` to before `end` were sampled by one version of the weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What vLLM says when a call has ended."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[Span]
    finish: str
    """stop, length or abort, as vLLM calls it."""
    stop: int | str | None
    """The token or the string that ended it."""
    timing: TurnTiming = TurnTiming()


class Service(Control, Protocol):
    """A vLLM that runs: what an engine asks of it. Calls raise what they like; it becomes an EngineFailure."""

    async def start(self, context: int) -> None:
        """Be ready for calls of so many tokens."""
        ...

    async def generate(self, call: Call) -> Answer:
        """An answer; a caller that goes away ends the call."""
        ...

    async def abort(self, name: str) -> None:
        """End a call early, if it is known already; it answers with what was sampled so far."""
        ...

    async def pause(self) -> None:
        """Sample nothing more; calls under way wait. Returns when no computation is under way."""
        ...

    async def resume(self) -> None: ...

    async def name_version(self, version: str) -> None:
        """Call the weights that are there by this version."""
        ...

    async def close(self) -> None: ...
