"""The fleet: several engines behind one. It spreads sessions and no more: an engine that dies fails its calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from turnwise.engines.base import Completion, Engine, Sampling
from turnwise.types import Tokens


REMEMBERED = 1 << 16
"""Sessions whose engine is known: nobody says when one has ended."""


class Fleet:
    """`Engine` over others. A session stays with the engine that has its prefixes; a new one goes to the engine with
    the fewest calls under way, and to the first of those."""

    shares_weights = False

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.context = min(engine.context for engine in engines)
        self.homes: dict[str, int] = {}
        self.calls: Counter[int] = Counter()

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        home = self.homes.pop(session, None)
        if home is None:
            home = min(range(len(self.engines)), key=lambda place: self.calls[place])
        self.homes[session] = home  # as the newest
        if len(self.homes) > REMEMBERED:
            del self.homes[next(iter(self.homes))]
        self.calls[home] += 1
        try:
            return await self.engines[home].generate(prompt, sampling, session=session, seed=seed)
        finally:
            self.calls[home] -= 1

    async def abort(self, session: str) -> None:
        if session in self.homes:
            await self.engines[self.homes[session]].abort(session)

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        await self.all(lambda engine: engine.load(weights, version))

    async def forget(self) -> None:
        self.homes.clear()
        await self.all(lambda engine: engine.forget())

    async def pause(self) -> None:
        await self.all(lambda engine: engine.pause())

    async def resume(self) -> None:
        await self.all(lambda engine: engine.resume())

    async def close(self) -> None:
        await self.all(lambda engine: engine.close())

    async def all(self, act: Callable[[Engine], Awaitable[None]]) -> None:
        await asyncio.gather(*(act(engine) for engine in self.engines))
