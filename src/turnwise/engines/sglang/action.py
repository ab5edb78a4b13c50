"""The action of a call while it is sampled, by one request to SGLang or by several."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from turnwise.engines.base import Completion, EngineFailure, Sampling
from turnwise.engines.recent_text import Decode, RecentText
from turnwise.tokens import Tokens
from turnwise.types import StopReason, TurnTiming


class GrowingAction:
    """Tokens so far, and why the action ends with the last of them.

    Where it ends is decided here, from all tokens: a request sees neither a stop string that began before it, nor that
    an abort came with an end token.

    Example:
        action = GrowingAction(Sampling(64, stop=("</answer>",)), end_tokens={2}, limit=64, decode=tokenizer.decode)
        action.add([5, 2], [-0.5, -0.1], version=3)
        action.stop     StopReason.end_token
    """

    def __init__(self, sampling: Sampling, *, end_tokens: Collection[int], limit: int, decode: Decode) -> None:
        """`limit`: tokens that it may have, by the call and by the context."""
        self.stops = sampling.stop
        self.end_tokens = end_tokens
        self.limit = limit
        self.decode = decode
        self.recent_text = RecentText(max(map(len, self.stops), default=0))
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stop: StopReason | None = None
        """None while it may go on."""

    @property
    def room(self) -> int:
        return self.limit - len(self.tokens)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Tokens that one version sampled. Those after the end of a stop string that a request did not see are
        dropped."""
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), 1):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.versions.append(version)
            self.stop = self.stop_at(token)
            if self.stop is StopReason.end_token and place < len(tokens):
                raise EngineFailure(f"sampled {len(tokens) - place} tokens after an end token")
            if self.stop is not None:
                return

    def stop_at(self, token: int) -> StopReason | None:
        """Why the action ends with this token, if it does."""
        if token in self.end_tokens:
            return StopReason.end_token
        if self.stops:
            text = self.recent_text.add(token, self.decode)
            if any(stop in text for stop in self.stops):
                return StopReason.stop_string
        return None if self.room else StopReason.length

    def following(self, prompt: Tokens) -> Tokens:
        """The prompt with what was sampled after it."""
        return np.concatenate([prompt, np.array(self.tokens, np.int32)]) if self.tokens else prompt

    def completion(self, stop: StopReason, timing: TurnTiming, cached: int) -> Completion:
        """All of it, in arrays that nobody can write to."""
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        versions = np.array(self.versions, np.int32)
        for array in (tokens, logprobs, versions):
            array.flags.writeable = False
        return Completion(tokens, logprobs, versions, stop, timing, cached=cached)
