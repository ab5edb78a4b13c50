"""The border to engines: tokens in, sampled tokens out, with the logprob and the version of every one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.types import Floats, StopReason, Tokens, TurnTiming


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one action is sampled.

    Example:
        Sampling(max_tokens=64, temperature=1.0, stop=("</answer>",))
    """

    max_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 for all tokens."""
    stop: tuple[str, ...] = ()
    """The action ends with the token that completes one of these."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What an engine sampled for one prompt."""

    tokens: Tokens
    logprobs: Floats
    """Under the distribution sampled from: after temperature, top-p and top-k."""
    versions: Tokens
    stop: StopReason
    timing: TurnTiming = TurnTiming()


class EngineFailure(RuntimeError):
    """The engine could not serve a request: an infrastructure error, never a zero reward."""


def check_call(prompt: Tokens, context: int, seed: int) -> None:
    """Refuse what no engine can serve."""
    if len(prompt) == 0:
        raise ValueError("an engine needs a prompt of at least one token")
    if len(prompt) >= context:
        raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"a seed has 64 bits, got {seed}")


class Engine(Protocol):
    """Serves model calls. `session` names an attempt, so that its turns can share computed prefixes; `seed` is 64 bits
    of sampling noise that depend on what is attempted and never on what else is in the batch.

    What an engine must do beyond these signatures is said by tests/engines/test_conformance.py.
    """

    shares_weights: bool
    """Whether the engine reads the learner's own module, so that a load is only a new version number."""
    context: int
    """Tokens that prompt and action may have together."""

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        """What is sampled after a prompt. A call that `check_call` refuses is a ValueError; one that the engine could
        not serve an EngineFailure."""
        ...

    async def abort(self, session: str) -> None:
        """End the running call of a session; it returns what was sampled so far."""
        ...

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Make these weights live between two sampled tokens; calls in flight go on with them."""
        ...

    async def forget(self) -> None:
        """Drop computed prefixes, so that what follows does not depend on what was served before."""
        ...

    async def pause(self) -> None:
        """Sample nothing more until `resume`; calls in flight wait."""
        ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        """End the engine; calls in flight fail."""
        ...
