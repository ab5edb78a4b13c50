"""Sessions by their keys, those that are over too."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from turnwise.serve.call import ServedCall
from turnwise.serve.dialects.answer import ServedAnswer
from turnwise.serve.dialects.ask import Ask, Delivery, Refusal

REMEMBERED = 4096
"""Keys of sessions that are over: who uses one is told so."""


class Serves(Protocol):
    """Who answers the requests that come with a key; all of it is called in its own event loop."""

    loop: asyncio.AbstractEventLoop
    model: str

    async def open(self, ask: Ask, delivery: Delivery) -> ServedCall: ...

    async def wait(self, call: ServedCall) -> ServedAnswer: ...

    async def record(self, call: ServedCall) -> None: ...

    async def hand_over(self, call: ServedCall) -> ServedAnswer: ...

    def leave(self, call: ServedCall, for_good: bool) -> None: ...


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
        self.secret = secrets.token_bytes(32)
        self.sessions: dict[bytes, tuple[bytes, Serves]] = {}
        """mark of a key -> (the key, whose it is)"""
        self.over: OrderedDict[bytes, None] = OrderedDict()

    def mark(self, key: bytes) -> bytes:
        """Under which a key is looked up. It cannot be told without our secret, so that the time a look-up takes says
        nothing of how much of a key is right."""
        return hashlib.blake2b(key, key=self.secret, digest_size=32).digest()

    def add(self, key: str, session: Serves) -> None:
        self.sessions[self.mark(key.encode())] = key.encode(), session

    def end(self, key: str) -> None:
        """The session is over; its key stays known for a while, as that of one that was."""
        mark = self.mark(key.encode())
        if self.sessions.pop(mark, None) is not None:
            self.over[mark] = None
            while len(self.over) > REMEMBERED:
                self.over.popitem(last=False)

    def find(self, given: bytes) -> Serves:
        """Whose a key is, as it came in a header: in UTF-8, or in Latin-1 from clients that still write that."""
        key = as_utf8(given)
        mark = self.mark(key)
        known, session = self.sessions.get(mark, (b"", None))
        if hmac.compare_digest(known, key) and session is not None:
            return session
        if mark in self.over:
            raise Refusal(410, "the attempt that this key belongs to is over", "session_over")
        raise Refusal(401, "this key is not known here; use the one that the agent was given", "invalid_api_key")


def as_utf8(given: bytes) -> bytes:
    try:
        return given.decode().encode()
    except UnicodeDecodeError:
        return given.decode("latin-1").encode()
