"""The wire between a run and the process of an environment: JSON in frames, and no code."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from turnwise.envs.base import Reply
from turnwise.envs.raised import unpacked
from turnwise.frames import HEAD, framed, length_of, receive_exactly, receive_exactly_async
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.types import Task

LONGEST = 1 << 28
"""The largest accepted frame, in bytes."""


def packed(value: Any) -> bytes:
    """The frame of a value."""
    return framed(json.dumps(value).encode())


def send(line: socket.socket, value: Any) -> None:
    line.sendall(packed(value))


def receive(line: socket.socket) -> Any:
    """The next value from the other side; EOFError if the other side has ended."""
    return json.loads(receive_exactly(line, length_of(receive_exactly(line, HEAD), LONGEST)))


async def receive_async(line: socket.socket) -> Any:
    """The same for a non-blocking socket, in the running event loop."""
    head = await receive_exactly_async(line, HEAD)
    return json.loads(await receive_exactly_async(line, length_of(head, LONGEST)))


# ---------------------------------------------------------------- values as JSON


def packed_task(task: Task) -> dict[str, Any]:
    return {"id": task.id, "dataset": task.dataset, "data": dict(task.data)}


def task_of(fields: Mapping[str, Any]) -> Task:
    return Task(**fields)


def packed_message(message: Message) -> dict[str, Any]:
    calls = [[call.name, dict(call.arguments)] for call in message.calls]
    return {"role": message.role, "content": message.content, "thinking": message.thinking, "calls": calls}


def message_of(fields: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(name, arguments) for name, arguments in fields["calls"])
    return Message(fields["role"], fields["content"], fields["thinking"], calls)


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
        "seats": [packed_reply(seat) for seat in reply.seats],
        "moves_next": reply.moves_next,
    }


def reply_of(fields: Mapping[str, Any] | None) -> Reply | None:
    if fields is None:
        return None
    history, tools = fields["history"], fields["tools"]
    return Reply(
        tuple(map(message_of, fields["messages"])),
        reward=fields["reward"],
        outcome=fields["outcome"],
        finished=fields["finished"],
        marks=fields["marks"],
        history=None if history is None else tuple(map(message_of, history)),
        stop=tuple(fields["stop"]),
        tools=None if tools is None else tuple(ToolSpec(*tool) for tool in tools),
        raised=tuple(map(unpacked, fields["raised"])),
        seats=tuple(reply for seat in fields["seats"] if (reply := reply_of(seat)) is not None),
        moves_next=fields["moves_next"],
    )
