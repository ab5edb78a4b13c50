"""The border to a running vLLM: a call and its answer, in process or over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from turnwise.tokens import Tokens
from turnwise.types import TurnTiming
from turnwise.weights.vllm_transfer import TransferControl


@dataclass(frozen=True, slots=True)
class VllmCall:
    """One request to vLLM.

    Example:
        VllmCall("8f1c", tokens, {"max_tokens": 64, "temperature": 1.0}, salt="3", session="train/hops/7/0/2/0")
    """

    name: str
    """To abort it by."""
    prompt: Tokens
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
class VllmAnswer:
    """The result of a finished call."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[Span]
    finish: str
    """stop, length or abort, as vLLM calls it."""
    stop: int | str | None
    """The token or the string that ended it."""
    timing: TurnTiming = TurnTiming()
    routes: NDArray[Any] | None = None
    """[n, layers, k] of all tokens but the last, from the one on that the call named; None where vLLM gave none."""


class VllmService(TransferControl, Protocol):
    """A running vLLM. Its methods may raise any exception; the engine turns it into an EngineFailure."""

    guidance_problem: str
    """Why no call may have a grammar; empty where calls may. Known once it has started."""

    async def start(self, context: int) -> None:
        """Be ready for calls of so many tokens."""
        ...

    async def check_alive(self) -> None:
        """Returns when it answers; raises where it is gone, or has other weights than were loaded into it."""
        ...

    async def generate(self, call: VllmCall) -> VllmAnswer:
        """The answer to a call; cancelling this ends the call."""
        ...

    async def abort(self, name: str) -> None:
        """End a call early, if vLLM has it already; its answer has the tokens sampled so far."""
        ...

    async def pause(self) -> None:
        """Sample nothing more; calls under way wait. Returns when no forward pass is under way."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int) -> None:
        """Give memory of the GPU back and forget all prefixes. Level 1 keeps the weights in the host's memory; level 2
        keeps nothing, and weights must be loaded after `wake`. Nothing may be under way."""
        ...

    async def wake(self, part: str) -> None:
        """Take memory again, for "weights" or for the "kv_cache"."""
        ...

    async def name_version(self, version: str) -> None:
        """Give the present weights this version."""
        ...

    async def close(self) -> None: ...
