"""Length-prefixed frames: 8 bytes that say how long a message is, then the message."""

from __future__ import annotations

import asyncio
import socket

HEAD = 8
"""Bytes that say how long a message is."""
PART = 1 << 20
"""Bytes that are received at once."""


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEAD, "little") + body


def length_of(head: bytes, longest: int | None = None) -> int:
    """Bytes that follow a head; ValueError if that is more than any message has."""
    size = int.from_bytes(head, "little")
    if longest is not None and size > longest:
        raise ValueError(f"a frame of {size} bytes is longer than any that is sent")
    return size


def receive_exactly(line: socket.socket, size: int) -> bytes:
    """The next `size` bytes of a socket; EOFError if the other side has gone."""
    received = bytearray()
    while len(received) < size:
        part = line.recv(min(size - len(received), PART))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


async def receive_exactly_async(line: socket.socket, size: int) -> bytes:
    """The same for a non-blocking socket, in the running event loop."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < size:
        part = await loop.sock_recv(line, min(size - len(received), PART))
        if not part:
            raise EOFError
        received += part
    return bytes(received)
