"""What goes between a run and the process of an environment: JSON in frames, and no code."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from turnwise.envs.base import Reply
from turnwise.envs.raised import unpacked
from turnwise.types import Message, Task, ToolCall, ToolSpec

HEAD = 8
"""Bytes that say how long a frame is."""
LONGEST = 1 << 28
"""Bytes of a frame that are believed."""


def framed(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(HEAD, "little") + body


def length_of(head: bytes) -> int:
    """Bytes that follow a head."""
    size = int.from_bytes(head, "little")
    if size > LONGEST:
        raise ValueError(f"a frame of {size} bytes is longer than any that is sent")
    return size


def send(line: socket.socket, value: Any) -> None:
    line.sendall(framed(value))


def receive(line: socket.socket) -> Any:
    """What the other side has sent next; EOFError where it has gone."""
    return json.loads(exactly(line, length_of(exactly(line, HEAD))))


def exactly(line: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = line.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


# ---------------------------------------------------------------- values as JSON


def packed_task(task: Task) -> dict[str, Any]:
    return {"id": task.id, "dataset": task.dataset, "data": dict(task.data)}


def task_of(packed: Mapping[str, Any]) -> Task:
    return Task(**packed)


def packed_message(message: Message) -> dict[str, Any]:
    calls = [[call.name, dict(call.arguments)] for call in message.calls]
    return {"role": message.role, "content": message.content, "thinking": message.thinking, "calls": calls}


def message_of(packed: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(name, arguments) for name, arguments in packed["calls"])
    return Message(packed["role"], packed["content"], packed["thinking"], calls)


def packed_reply(reply: Reply | None) -> dict[str, Any] | None:
    if reply is None:
        return None
    return {
        "messages": [packed_message(message) for message in reply.messages],
        "reward": reply.reward,
        "outcome": reply.outcome,
        "finished": reply.finished,
        "marks": dict(reply.marks),
        "history": None if reply.history is None else [packed_message(message) for message in reply.history],
        "stop": list(reply.stop),
        "tools": None
        if reply.tools is None
        else [[tool.name, tool.description, dict(tool.parameters)] for tool in reply.tools],
        "raised": [raised.packed() for raised in reply.raised],
    }


def reply_of(packed: Mapping[str, Any] | None) -> Reply | None:
    if packed is None:
        return None
    history, tools = packed["history"], packed["tools"]
    return Reply(
        tuple(map(message_of, packed["messages"])),
        reward=packed["reward"],
        outcome=packed["outcome"],
        finished=packed["finished"],
        marks=packed["marks"],
        history=None if history is None else tuple(map(message_of, history)),
        stop=tuple(packed["stop"]),
        tools=None if tools is None else tuple(ToolSpec(*tool) for tool in tools),
        raised=tuple(map(unpacked, packed["raised"])),
    )
