"""The wire between an engine's process and the one that calls it: messages in frames, sent without waiting."""

from __future__ import annotations

import asyncio
import pickle
import socket
from typing import Any

from turnwise import frames


class Wire:
    """One end. Messages are sent without waiting and arrive in order; the end of the other side is an EOFError.

    Example:
        wire = await Wire.over(line)
        wire.send((1, "ping", ()))
        number, answer = await wire.receive()
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def over(cls, line: socket.socket) -> Wire:
        connect = asyncio.open_unix_connection if line.family == socket.AF_UNIX else asyncio.open_connection
        return cls(*await connect(sock=line))

    def send(self, message: Any) -> None:
        if not self.writer.is_closing():
            self.writer.write(framed(message))

    async def receive(self) -> Any:
        try:
            size = frames.length_of(await self.reader.readexactly(frames.HEAD))
            return pickle.loads(await self.reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            raise EOFError from None

    def close(self) -> None:
        self.writer.close()

    def cut(self) -> None:
        """Close this end although the other one may take nothing any more; `receive` raises EOFError."""
        self.writer.transport.abort()


def framed(message: Any) -> bytes:
    return frames.framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
