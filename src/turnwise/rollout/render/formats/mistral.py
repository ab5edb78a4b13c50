"""Calls as Mistral writes them: [TOOL_CALLS][{"name": ..., "arguments": {...}}], or since Mistral Small 3.2
[TOOL_CALLS]name[ARGS]{...} for each call, sometimes with [CALL_ID] between or without [ARGS]."""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.formats.json_lists import read_values
from turnwise.rollout.render.toolcalls import (
    CLOSED,
    THINK,
    Fault,
    Format,
    call_of,
    make_call,
    read_blocks,
    read_json,
    skip_space,
    split_thinking,
)

BEGIN = re.compile(r"\[TOOL_CALLS\]")
HEADER = re.compile(r"([^\[{]{0,200}?)(?:\[CALL_ID\][^\[{]{0,64})?(?:\[ARGS\])?\s{0,16}(?=\{)")
MARKS = ("[THINK]", "[/THINK]")
HELP = "write [TOOL_CALLS]name[ARGS]{...}"


def read_mistral(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    marks = MARKS if MARKS[1] in text or text.lstrip().startswith(MARKS[0]) else (THINK, CLOSED)
    thinking, answer = split_thinking(text, marks, BEGIN)
    return read_blocks(answer, BEGIN, read_after_mark, thinking, HELP)


def read_after_mark(text: str, position: int) -> tuple[list[ToolCall], int]:
    start = skip_space(text, position)
    if text.startswith("[{", start) or re.match(r"\[\s", text[start : start + 2]):
        calls, position = read_values(text, start, call_of_mistral)
        if not calls:
            raise Fault("the list has no call")
        return calls, position
    header = HEADER.match(text, start)
    if header is None:
        raise Fault("a call has a name, [ARGS] and an object")
    if not header[1].strip():
        value, position = read_json(text, header.end())
        return [call_of(value)], position
    arguments, position = read_json(text, header.end())
    return [make_call(header[1].strip(), arguments)], position


def call_of_mistral(value: object) -> ToolCall:
    """A call of the list; arguments may be missing."""
    if isinstance(value, dict) and "name" in value and not {"arguments", "parameters"} & value.keys():
        return make_call(value["name"], {})
    return call_of(value)


MISTRAL = Format(read_mistral, thinking=MARKS, help_text=HELP)
