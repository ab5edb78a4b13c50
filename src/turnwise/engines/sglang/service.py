"""The border to a running SGLang: a request and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnwise.tokens import Tokens


@dataclass(frozen=True, slots=True)
class SglangRequest:
    """One request to SGLang: a call, or what is left of one.

    Example:
        SglangRequest("8f1c", tokens, {"max_new_tokens": 64, "temperature": 1.0}, salt="3.0", session="train/hops/7/0")
    """

    name: str
    """To abort it by."""
    prompt: Tokens
    """With the tokens that were sampled before, where the call goes on."""
    sampling: Mapping[str, Any]
    """As SGLang's SamplingParams call it."""
    salt: str
    """Prefixes are shared between requests of the same salt only."""
    session: str
    is_cut: bool = False
    """Whether the logprobs shall be those after top-p and top-k."""


@dataclass(frozen=True, slots=True)
class SglangAnswer:
    """What one request gave. All its tokens were sampled by the same weights."""

    tokens: Sequence[Any]
    logprobs: Sequence[Any]
    weights: Any
    """The name of the weights."""
    finish: Any
    """stop, length or abort, as SGLang calls it."""
    matched: Any = None
    """The token or the string that ended it."""
    message: str = ""
    """Why it was aborted."""
    cached: int = 0
    """Tokens of the prompt that were not computed again."""


class SglangService(Protocol):
    """A running SGLang. Its methods may raise any exception; the engine turns it into an EngineFailure."""

    async def start(self, context: int) -> None:
        """Be ready for calls of so many tokens."""
        ...

    async def check_alive(self) -> None:
        """Returns when it answers; raises where it is gone, or has other weights than were loaded into it."""
        ...

    async def generate(self, request: SglangRequest) -> SglangAnswer:
        """The answer to a request; cancelling this ends the request."""
        ...

    async def abort(self, name: str) -> None:
        """End a request early, if SGLang has it already; its answer has the tokens sampled so far."""
        ...

    async def abort_all(self) -> None:
        """End every request that SGLang has."""
        ...

    async def load(self, folder: Path, version: int) -> None:
        """Load the weights of a folder, once no request is under way. They are called `weights_of(version)`."""
        ...

    def weights_of(self, version: int) -> str:
        """The name of a version, which nobody else gives."""
        ...

    async def close(self) -> None: ...
