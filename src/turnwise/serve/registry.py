"""Sessions by their keys, those that are over too."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from turnwise.serve.answer import Answer
from turnwise.serve.ask import Ask, Delivery, Refusal
from turnwise.serve.call import Call

REMEMBERED = 4096
"""Keys of sessions that are over: who uses one is told so."""


class Serves(Protocol):
    """Who answers the requests that come with a key; all of it is called in its own event loop."""

    loop: asyncio.AbstractEventLoop
    model: str

    async def open(self, ask: Ask, delivery: Delivery) -> Call: ...

    async def wait(self, call: Call) -> Answer: ...

    async def record(self, call: Call) -> None: ...

    async def hand_over(self, call: Call) -> Answer: ...

    def leave(self, call: Call, for_good: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where and as whom a client reaches its session.

    Example:
        openai.OpenAI(base_url=address.base_url, api_key=address.key)
    """

    base_url: str
    """With /v1, as OpenAI's clients want it; Anthropic's want it without."""
    key: str
    model: str


class Registry:
    """Who answers to which key."""

    def __init__(self, largest_body: int) -> None:
        self.largest_body = largest_body
        """Bytes of a request's body."""
        self.sessions: dict[str, Serves] = {}
        self.over: OrderedDict[str, None] = OrderedDict()

    def add(self, key: str, session: Serves) -> None:
        self.sessions[key] = session

    def end(self, key: str) -> None:
        """The session is over; its key stays known for a while, as that of one that was."""
        if self.sessions.pop(key, None) is not None:
            self.over[key] = None
            while len(self.over) > REMEMBERED:
                self.over.popitem(last=False)

    def find(self, key: str) -> Serves:
        session = self.sessions.get(key)
        if session is not None:
            return session
        if key in self.over:
            raise Refusal(410, "the attempt that this key belongs to is over", "session_over")
        raise Refusal(401, "this key is not known here; use the one that the agent was given", "invalid_api_key")
