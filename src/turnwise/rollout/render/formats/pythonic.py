"""Calls as Python writes them: [get(name="amber", links=2), put(...)].

Llama 4, Gemma 3 and ToolACE write them bare, LFM2 between <|tool_call_start|> and <|tool_call_end|>, OLMo 3 line by
line between <function_calls> and </function_calls>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.formats.coerce import properties_of, types_of
from turnwise.rollout.render.formats.literals import AFTER_ARGUMENT, read_literal
from turnwise.rollout.render.toolcalls import (
    Fault,
    Format,
    Reader,
    call_of,
    check_value,
    make_call,
    one_of,
    read_blocks,
    read_json,
    skip_space,
    split_thinking,
    spoken_with,
)

NAME = re.compile(r"[^\W\d][\w.\-]{0,127}(?=\s{0,8}\()")
KEY = re.compile(r"([^\W\d][\w\-]{0,127})\s*=(?!=)")
LIST = re.compile(r"\[\s*[^\W\d][\w.\-]{0,127}\s{0,8}\(")
JSON_CALLS = re.compile(r'\s*\[?\s*\{\s*"')
PYTHON = ("<|python_start|>", "<|python_end|>")
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
OLMO = ("<function_calls>", "</function_calls>")
HELP = "write calls as [name(key=value, ...), ...] with literal values"


def read_pythonic(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    """A list of calls. In the middle of an answer it counts only if it can be read."""
    thinking, answer = split_thinking(text, calls=LIST)
    body = answer.replace(PYTHON[0], "").replace(PYTHON[1], "")
    begin = LIST.search(body)
    if begin is None:
        return Message("assistant", answer, thinking)
    try:
        calls, end = read_calls(body, begin.start(), tools)
    except Fault as fault:
        if body[: begin.start()].strip():
            return Message("assistant", answer, thinking)
        raise Fault(f"a tool call could not be read: {fault}; {HELP}") from None
    return spoken_with(thinking, [body[: begin.start()], body[end:]], calls)


def reader_between(begin: str, end: str) -> Reader:
    """A reader of calls between two marks."""
    mark = one_of([begin])

    def read(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        def block(answer: str, position: int) -> tuple[list[ToolCall], int]:
            if JSON_CALLS.match(answer, position):
                calls, after = read_json_calls(answer, position)
            else:
                calls, after = read_calls(answer, position, tools)
            if not calls:
                raise Fault("there is no call")
            if not answer.startswith(end, close := skip_space(answer, after)):
                raise Fault(f"calls must be closed with {end}, with nothing between")
            return calls, close + len(end)

        thinking, answer = split_thinking(text, calls=mark)
        return read_blocks(answer, mark, block, thinking, f"write {begin}[name(key=value, ...)]{end}")

    return read


def read_json_calls(text: str, position: int) -> tuple[list[ToolCall], int]:
    value, end = read_json(text, position)
    return [call_of(item) for item in (value if isinstance(value, list) else [value])], end


def read_calls(text: str, position: int, tools: Sequence[ToolSpec]) -> tuple[list[ToolCall], int]:
    """The calls of a list, or of lines without brackets."""
    position = skip_space(text, position)
    in_list = text.startswith("[", position)
    position = skip_space(text, position + in_list)
    calls: list[ToolCall] = []
    while (name := NAME.match(text, position)) is not None:
        call, position = read_call(text, name, tools)
        calls.append(call)
        position = skip_space(text, position)
        if text.startswith(",", position):
            position = skip_space(text, position + 1)
    if in_list:
        if not text.startswith("]", position):
            raise Fault("a list holds something that is no call, or has no closing bracket")
        position += 1
    return calls, position


def read_call(text: str, name: re.Match[str], tools: Sequence[ToolSpec]) -> tuple[ToolCall, int]:
    """(the call of a name, the position after its bracket). Values without a key follow the order of the schema."""
    properties = properties_of(tools, name[0])
    arguments: dict[str, Any] = {}
    position = skip_space(text, text.index("(", name.end()) + 1)
    while not text.startswith(")", position):
        if keyed := KEY.match(text, position):
            key, position = keyed[1], keyed.end()
        else:
            key = next((known for known in properties if known not in arguments), "")
            if not key:
                raise Fault("an argument has no name; write name(key=value)")
        if key in arguments:
            raise Fault("an argument is given twice")
        bare = "string" in types_of(properties.get(key))
        arguments[key], position = read_literal(text, position, bare=bare, after=AFTER_ARGUMENT)
        if text.startswith(",", position):
            position = skip_space(text, position + 1)
        elif not text.startswith(")", position) and not KEY.match(text, position):
            raise Fault("a call has no closing bracket")
    check_value(arguments)
    return make_call(name[0], arguments), position + 1


def offer_pythonic(tools: Sequence[ToolSpec]) -> str:
    """The description of tools in the words of Llama 4's model card."""
    offered = json.dumps([tool.schema["function"] for tool in tools], ensure_ascii=False, indent=4)
    return (
        "You may call functions. To do so, answer with a list of calls and nothing else, in the format "
        f"[func_name(params_name=params_value, ...), ...]. The functions, in JSON format:\n{offered}"
    )


def write_pythonic(message: Message) -> str:
    """Values by repr, whose literals are Python's."""
    calls = [f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in message.calls]
    return f"[{', '.join(calls)}]" if calls else message.content


PYTHONIC = Format(read_pythonic, write_pythonic, offer_pythonic)
LFM2_FORMAT = Format(reader_between(*LFM2), help_text=f"write {LFM2[0]}[name(key=value, ...)]{LFM2[1]}")
OLMO_FORMAT = Format(reader_between(*OLMO), help_text=f"write {OLMO[0]}name(key=value, ...){OLMO[1]}")
