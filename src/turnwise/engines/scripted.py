"""An engine that follows a script, without a model: for tests, demonstrations and people at a terminal."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from turnwise.engines.base import (
    MOST_TOKENS,
    NO_ROUTES,
    BusyTime,
    Completion,
    EngineFailure,
    OnTokens,
    SampledPart,
    Sampling,
    checked_prompt,
    nothing,
)
from turnwise.engines.guidance import NO_GRAMMARS
from turnwise.tokens import Tokens
from turnwise.types import StopReason

Spoken = str | Tokens
"""A text, to which an end token is added, or the tokens of an action."""
Script = Callable[[Tokens, str, int], Awaitable[Spoken] | AsyncIterator[str] | Spoken]
"""(prompt, session, seed) -> what to say, whole or piece by piece."""


class ScriptedEngine:
    """`StreamingEngine` whose actions are the tokens of a script's text and an end token, each with the same logprob.
    It reports a text token by token, and the pieces of an asynchronous generator as they come.

    Example:
        ScriptedEngine(lambda prompt, session, seed: "get amber", tokenizer.encode, end_token=2)
    """

    shares_weights = True
    streams = True

    def __init__(
        self,
        script: Script,
        encode: Callable[[str], list[int]],
        *,
        end_token: int,
        context: int = 1 << 20,
        vocabulary: int = MOST_TOKENS + 1,
        logprob: float = -0.5,
    ) -> None:
        self.script = script
        self.encode = encode
        self.end_token = end_token
        self.context = context
        self.vocabulary = vocabulary
        self.logprob = logprob
        self.version = 0
        self.prompts: list[Tokens] = []
        self.speaking: dict[asyncio.Future[Spoken], str] = {}  # asynchronous scripts under way -> session
        self.ended: set[asyncio.Future[Spoken]] = set()  # scripts that were cancelled by the engine
        self.closed = False
        self.busy = BusyTime()
        self.running = asyncio.Event()
        self.running.set()

    @property
    def seconds(self) -> float:
        """The time during which at least one script was under way: there is no model."""
        return self.busy.seconds

    async def open(self) -> None:
        return None

    async def generate(
        self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int, on_tokens: OnTokens | None = None
    ) -> Completion:
        prompt = checked_prompt(prompt, seed, context=self.context, vocabulary=self.vocabulary)
        # An expert's text, which no model sampled, has no logprob and needs none under a grammar.
        if sampling.grammar is not None and not math.isnan(self.logprob):
            raise ValueError(NO_GRAMMARS)
        if sampling.routes is not None and not math.isnan(self.logprob):
            raise ValueError(NO_ROUTES)
        if sampling.max_tokens == 0:
            return nothing(StopReason.length)
        self.prompts.append(prompt)
        room = min(sampling.max_tokens, self.context - len(prompt))
        recital = Recital(self, sampling.stop, room, on_tokens)
        try:
            with self.busy:
                said = self.script(prompt, session, seed)
                if isinstance(said, AsyncIterator):
                    said = recital.listen(said)
                text = said if isinstance(said, (str, np.ndarray)) else await self.listen(said, session)
            while not self.running.is_set():
                await self.running.wait()
        except Aborted:
            return self.completion(recital.tokens, StopReason.abort)
        if recital.stop is not None:
            return self.completion(recital.tokens, recital.stop)
        spoken, stop = self.tokens_of(text, sampling.stop)
        for token in spoken[:room] if on_tokens is not None else []:
            recital.add([token])
        return self.completion(spoken[:room], stop if len(spoken) <= room else StopReason.length)

    def tokens_of(self, said: Spoken, stops: tuple[str, ...]) -> tuple[list[int], StopReason]:
        """The whole action, and what ends it."""
        if not isinstance(said, str):
            return said.tolist(), StopReason.end_token
        ends = [said.find(stop) + len(stop) for stop in stops if stop in said]
        if ends:
            return self.encode(said[: min(ends)]), StopReason.stop_string
        return [*self.encode(said), self.end_token], StopReason.end_token

    def completion(self, tokens: list[int], stop: StopReason) -> Completion:
        logprobs = np.full(len(tokens), self.logprob, np.float32)
        return Completion(np.array(tokens, np.int32), logprobs, np.full(len(tokens), self.version, np.int32), stop)

    async def listen(self, said: Awaitable[Spoken], session: str) -> Spoken:
        """The result of an asynchronous script, unless the engine cancels it."""
        speaking = asyncio.ensure_future(said)
        self.speaking[speaking] = session
        try:
            return await speaking
        except asyncio.CancelledError:
            if speaking not in self.ended:
                raise
            if self.closed:
                raise EngineFailure("the engine failed: it was closed") from None
            raise Aborted from None
        finally:
            del self.speaking[speaking]
            self.ended.discard(speaking)

    async def abort(self, session: str) -> None:
        self.end([speaking for speaking, other in self.speaking.items() if other == session])

    def end(self, scripts: list[asyncio.Future[Spoken]]) -> None:
        self.ended.update(scripts)
        for speaking in scripts:
            speaking.cancel()

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        self.version = version

    async def forget(self) -> None:
        return None

    async def pause(self) -> None:
        self.running.clear()

    async def resume(self) -> None:
        self.running.set()

    async def close(self) -> None:
        self.closed = True
        self.end(list(self.speaking))


class Recital:
    """An action that a script says piece by piece."""

    def __init__(
        self, engine: ScriptedEngine, stops: tuple[str, ...], room: int, on_tokens: OnTokens | None = None
    ) -> None:
        self.engine = engine
        self.stops = stops
        self.room = room
        self.on_tokens = on_tokens
        self.tokens: list[int] = []
        self.stop: StopReason | None = None
        """What ended it; None if it is not over, or was not said piece by piece."""

    async def listen(self, pieces: AsyncIterator[str]) -> str:
        """Its text, up to a stop string or the last token that there is room for."""
        text = ""
        async for piece in pieces:
            before, text = len(text), text + piece
            ends = [text.find(stop) + len(stop) for stop in self.stops if stop in text]
            text = text[: min(ends, default=len(text))]
            self.add(self.engine.encode(text[before:]))
            if ends or len(self.tokens) >= self.room:
                self.stop = StopReason.stop_string if ends else StopReason.length
                return text
        self.add([self.engine.end_token])
        self.stop = StopReason.end_token
        return text

    def add(self, tokens: list[int]) -> None:
        new = tokens[: self.room - len(self.tokens)]
        self.tokens += new
        if self.on_tokens is not None and new:
            part = self.engine.completion(new, StopReason.abort)
            self.on_tokens(SampledPart(part.tokens, part.logprobs, part.versions))


class Aborted(Exception):
    """The call of a script was aborted."""


UNKNOWN = math.nan
"""The logprob of a token that no model sampled."""
