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
    call_of,
    call_text,
    make_call,
    read_blocks,
    read_json,
    spoken_with,
)

HELP = 'write {"name": ..., "parameters": {...}} and nothing else'
OBJECT = re.compile(r'\{\s*"')
LIST = re.compile(r'\s*\[\s*\{\s*"')
SEPARATOR = re.compile(r"(?:[;,]|<\|python_tag\|>)\s*")
TAG = re.compile(re.escape(PYTHON_TAG) + r'|(?<=\});\s*(?=\{\s*"name")')
"""What begins calls: the tag, or a semicolon before a call that could not be read with those before it."""
SEMICOLONS = re.compile(";+")
CALL = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"')


def read_llama(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    """Calls after each tag or at the start of the text. Elsewhere the first object that looks like a call is one only
    if it can be read: otherwise it is part of an answer."""
    if PYTHON_TAG in text:
        return read_blocks(text, TAG, read_after_tag, "", HELP)
    at_start = OBJECT.match(text.lstrip()) is not None
    place = CALL.search(text)
    if not at_start and place is None:
        return Message("assistant", text)
    start = 0 if at_start or place is None else place.start()
    try:
        calls, end = read_objects(text, start)
    except Fault as fault:
        if not at_start:
            return Message("assistant", text)
        raise Fault(f"a tool call could not be read: {fault}; {HELP}") from None
    return spoken_with("", [text[:start], text[end:]], calls) if calls else Message("assistant", text)


def read_after_tag(text: str, position: int) -> tuple[list[ToolCall], int]:
    """The calls after a tag: objects one after another, or a list of them."""
    if LIST.match(text, position):
        values, position = read_json(text, position)
        return [call_of(value, "parameters") for value in values], position
    calls, position = read_objects(text, position, partly=True)
    if not calls:
        raise Fault('a call is an object with "name" and "parameters"')
    return calls, position


def read_objects(text: str, position: int, *, partly: bool = False) -> tuple[list[ToolCall], int]:
    """(the calls that begin at `position`, the position after them); no calls if all of it is another JSON value. With
    `partly`, calls end before one that cannot be read."""
    calls: list[ToolCall] = []
    after = position
    while True:
        try:
            call, after_one = read_object(text, position)
        except Fault:
            if calls and partly:
                return calls, after
            raise
        if call is None and not calls and after_one == len(text):
            return [], after_one
        if call is None:
            raise Fault('a call is an object with "name" and "parameters"')
        calls.append(call)
        after = after_one
        separator = SEPARATOR.match(text, after)
        position = separator.end() if separator else after
        if not OBJECT.match(text, position):
            rest = SEMICOLONS.match(text, after)
            return calls, rest.end() if rest else after


def read_object(text: str, position: int) -> tuple[ToolCall | None, int]:
    """The call at `position`, None if the value there is no call, and the position after it."""
    value, position = read_json(text, position)
    if not isinstance(value, dict) or "name" not in value:
        return None, position
    return make_call(value["name"], value.get("parameters", value.get("arguments")), "parameters"), position


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
