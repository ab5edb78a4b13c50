"""The line between a run and one of its rollout workers: messages in frames, those of a round of the event loop
together, and a way to know that the other side has nothing more to say.

Messages are tuples that begin with a word. Tokens, logprobs and groups travel as the bytes of their arrays (pickle),
and trajectories share one buffer for all of their prompts.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

from turnwise.engines.base import Completion, Sampling
from turnwise.engines.remote.wire import Wire

Message = tuple[Any, ...]

COMPLETION = attrgetter(*(each.name for each in fields(Completion)))
SAMPLING = attrgetter(*(each.name for each in fields(Sampling)))
TICK: Message = ("tick",)
TOCK: Message = ("tock",)


class WorkerLine:
    """One end of the line.

    Example:
        line = WorkerLine(await Wire.over(socket))
        line.send("make", "train", request)
        for word, *values in await line.receive(): ...
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.outbox: list[Message] = []
        self.flushing: asyncio.Handle | None = None
        self.num_sent = self.num_received = 0
        """Frames."""

    def send(self, *message: Any) -> int:
        """Send a message with the others of this round of the loop: the number of the frame it is in."""
        self.outbox.append(message)
        if self.flushing is None:
            self.flushing = asyncio.get_running_loop().call_soon(self.flush)
        return self.num_sent + 1

    def flush(self) -> None:
        """Send what waits, now."""
        if self.flushing is not None:
            self.flushing.cancel()
            self.flushing = None
        if self.outbox:
            messages, self.outbox = self.outbox, []
            self.num_sent += 1
            self.wire.send(messages)

    async def receive(self) -> list[Message]:
        """The messages of the next frame; EOFError where the other side has gone."""
        messages: list[Message] = await self.wire.receive()
        self.num_received += 1
        return messages

    def close(self) -> None:
        self.wire.close()

    def cut(self) -> None:
        self.wire.cut()


def fields_of(value: Completion | Sampling) -> tuple[Any, ...]:
    """The fields of a call or an answer, which travel faster than the value: pickle asks dataclasses for theirs each
    time."""
    found: tuple[Any, ...] = COMPLETION(value) if isinstance(value, Completion) else SAMPLING(value)
    return found


@lru_cache(maxsize=4096)
def sampling_of(*fields: Any) -> Sampling:
    """The call that some fields describe. Most turns of a run have the same, which are checked once."""
    return Sampling(*fields)
