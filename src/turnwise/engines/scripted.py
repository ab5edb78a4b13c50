"""An engine that says what it is told, without a model: for tests, demonstrations and people at a terminal."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from turnwise.engines.base import Completion, Sampling
from turnwise.types import StopReason, Tokens

Script = Callable[[Tokens, str, int], Awaitable[str] | str]
"""(prompt, session, seed) -> what to say."""


class ScriptedEngine:
    """`Engine` whose actions are the tokens of a script's text and an end token, each with the same logprob.

    Example:
        ScriptedEngine(lambda prompt, session, seed: "get amber", tokenizer.encode, end_token=2)
    """

    shares_weights = True

    def __init__(
        self,
        script: Script,
        encode: Callable[[str], list[int]],
        *,
        end_token: int,
        context: int = 1 << 20,
        logprob: float = -0.5,
    ) -> None:
        self.script = script
        self.encode = encode
        self.end_token = end_token
        self.context = context
        self.logprob = logprob
        self.version = 0
        self.prompts: list[Tokens] = []

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        if not 0 < len(prompt) < self.context:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit a context of {self.context}")
        self.prompts.append(prompt)
        said = self.script(prompt, session, seed)
        text = said if isinstance(said, str) else await said
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        spoken = self.encode(text[: min(ends)]) if ends else [*self.encode(text), self.end_token]
        room = min(sampling.max_tokens, self.context - len(prompt))
        stop = StopReason.stop_string if ends else StopReason.end_token
        stop = stop if len(spoken) <= room else StopReason.length
        tokens = np.array(spoken[:room], np.int32)
        logprobs = np.full(len(tokens), self.logprob, np.float32)
        return Completion(tokens, logprobs, np.full(len(tokens), self.version, np.int32), stop)

    async def abort(self, session: str) -> None:
        return None

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        self.version = version

    async def forget(self) -> None:
        return None

    async def pause(self) -> None:
        return None

    async def resume(self) -> None:
        return None

    async def close(self) -> None:
        return None


UNKNOWN = math.nan
"""The logprob of a token that no model sampled."""
