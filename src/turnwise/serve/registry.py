"""Sessions by their keys, including those that are over."""

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
from turnwise.serve.seal import ThinkingSeal
from turnwise.serve.stored import StoredResponses
from turnwise.serve.streamed import Piece

REMEMBERED = 4096
"""Keys of ended sessions that are kept, so that a client that uses one gets a clear error."""


class Serves(Protocol):
    """Answers the requests that come with a key. All methods run in `loop`."""

    loop: asyncio.AbstractEventLoop
    model: str
    aliases: tuple[str, ...]
    """Other names of the model; "*" for any."""
    stored: StoredResponses

    async def open(self, ask: Ask, delivery: Delivery) -> ServedCall: ...

    async def count(self, ask: Ask) -> int: ...

    async def next_pieces(self, call: ServedCall, index: int) -> list[Piece]: ...

    async def wait(self, call: ServedCall) -> ServedAnswer: ...

    async def record(self, call: ServedCall) -> None: ...

    async def hand_over(self, call: ServedCall) -> ServedAnswer: ...

    def leave(self, call: ServedCall, for_good: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    """The address and key with which a client reaches its session.

    Example:
        openai.OpenAI(base_url=address.base_url, api_key=address.key)
    """

    base_url: str
    """Ends with /v1, as OpenAI's clients need it; Anthropic's clients need it without."""
    key: str
    model: str


class Registry:
    """Finds the session of a key."""

    def __init__(self, largest_body: int, seal: ThinkingSeal | None = None) -> None:
        self.seal = ThinkingSeal() if seal is None else seal
        self.largest_body = largest_body
        """The largest request body, in bytes."""
        self.secret = secrets.token_bytes(32)
        self.sessions: dict[bytes, tuple[bytes, Serves]] = {}
        """mark of a key -> (the key, its session)"""
        self.over: OrderedDict[bytes, None] = OrderedDict()

    def mark(self, key: bytes) -> bytes:
        """The hash under which a key is looked up. It depends on our secret, so that the time of a look-up does not
        reveal how much of a key is right."""
        return hashlib.blake2b(key, key=self.secret, digest_size=32).digest()

    def add(self, key: str, session: Serves) -> None:
        self.sessions[self.mark(key.encode())] = key.encode(), session

    def end(self, key: str) -> None:
        """End a session. Its key is remembered for a while as that of an ended one."""
        mark = self.mark(key.encode())
        if self.sessions.pop(mark, None) is not None:
            self.over[mark] = None
            while len(self.over) > REMEMBERED:
                self.over.popitem(last=False)

    def find(self, header: bytes) -> Serves:
        """The session of a key from a header: in UTF-8, or in Latin-1 from clients that still write that."""
        key = as_utf8(header)
        mark = self.mark(key)
        known_key, session = self.sessions.get(mark, (b"", None))
        if hmac.compare_digest(known_key, key) and session is not None:
            return session
        if mark in self.over:
            raise Refusal(410, "the attempt that this key belongs to is over", "session_over")
        raise Refusal(401, "this key is unknown; use the key that the agent received", "invalid_api_key")


def as_utf8(header: bytes) -> bytes:
    try:
        return header.decode().encode()
    except UnicodeDecodeError:
        return header.decode("latin-1").encode()
