"""Calls as Llama 3 writes them: {"name": ..., "parameters": {...}}, after an optional <|python_tag|>; several follow
each other, after a semicolon or without one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.toolcalls import (
    PYTHON_TAG,
    Fault,
    Format,
    call_text,
    make_call,
    read_json,
    spoken_with,
)

HELP = 'write {"name": ..., "parameters": {...}} and nothing else'
OBJECT = re.compile(r'\{\s*"')
SEPARATOR = re.compile(r"(?:[;,]|<\|python_tag\|>)\s*")
CALL = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"')


def read_llama(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    """Calls after the tag or at the start of the text. Elsewhere the first object that looks like a call is one only if
    it can be read: otherwise it is part of an answer."""
    before, tag, after = text.partition(PYTHON_TAG)
    if not tag and not OBJECT.match(text.lstrip()):
        place = CALL.search(text)
        if place is None:
            return Message("assistant", text)
        before, after = text[: place.start()], text[place.start() :]
        try:
            calls, rest = read_objects(after)
        except Fault:
            return Message("assistant", text)
        return spoken_with("", [before, rest], calls) if calls else Message("assistant", text)
    try:
        calls, rest = read_objects(after if tag else text)
    except Fault as fault:
        raise Fault(f"a tool call could not be read: {fault}; {HELP}") from None
    if not calls and tag:
        raise Fault(f'a tool call could not be read: a call is an object with "name" and "parameters"; {HELP}')
    if not calls:
        return Message("assistant", text)  # an answer that is JSON
    return spoken_with("", [before if tag else "", rest], calls)


def read_objects(text: str) -> tuple[list[ToolCall], str]:
    """(the calls at the start of a text, what follows them); no calls if the text is another JSON value."""
    calls: list[ToolCall] = []
    position = 0
    while True:
        value, position = read_json(text, position)
        if not isinstance(value, dict) or "name" not in value:
            if not calls and position == len(text):
                return [], ""
            raise Fault('a call is an object with "name" and "parameters"')
        arguments = value.get("parameters", value.get("arguments"))
        calls.append(make_call(value["name"], arguments, "parameters"))
        separator = SEPARATOR.match(text, position)
        start = separator.end() if separator else position
        if not OBJECT.match(text, start):
            return calls, text[position:].lstrip(";")
        position = start


def offer_llama(tools: Sequence[ToolSpec]) -> str:
    """The description of tools in Llama's templates."""
    offered = "\n\n".join(json.dumps(tool.schema, ensure_ascii=False, indent=4) for tool in tools)
    return (
        "You have access to the following functions. To call a function, please respond with JSON for a function call. "
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
        f"Do not use variables.\n\n{offered}"
    )


def write_llama(message: Message) -> str:
    return "; ".join(call_text(call, "parameters") for call in message.calls) or message.content


LLAMA = Format(read_llama, write_llama, offer_llama)
