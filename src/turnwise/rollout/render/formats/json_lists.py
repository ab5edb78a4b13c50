"""Calls as JSON between marks: a list of objects, or objects one after another.

granite     <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
granite_20b <function_call> {...} for each call
nemotron    <TOOLCALL>[...]</TOOLCALL>
jamba       <tool_calls>[...]</tool_calls>; Apriel and MiniMax-M1 write the same marks
cohere      <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>
phi4        functools[...], or <|tool_call|>[...]<|/tool_call|>
internlm    <|action_start|><|plugin|>{...}<|action_end|>
apertus     <|tools_prefix|>[{"get": {...}}, ...]<|tools_suffix|>
gigachat    <|function_call|>{...}
xlam        [...] and nothing else, also in a code block or after [TOOL_CALLS]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.toolcalls import (
    CLOSED,
    THINK,
    Fault,
    Format,
    Reader,
    call_of,
    make_call,
    read_blocks,
    read_json,
    skip_space,
    split_thinking,
    spoken_with,
)

OBJECTS = 'write {begin}[{{"name": ..., "arguments": {{...}}}}]{end}'
COHERE_THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")
COHERE_MARKS = re.compile(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>")
BARE_LIST = re.compile(r'\s*\[\s*\{\s*"')
BARE_OBJECT = re.compile(r'\s*\{\s*"name"\s*:\s*"[^"]{1,128}"\s*,\s*"arguments"')
CODE = re.compile(r"```(?:json)?\s*(?=\[\s*\{)")


def named_tool(value: Any) -> ToolCall:
    """A call of Cohere: tool_name and parameters, or the names that most others give them."""
    if isinstance(value, dict) and "name" in value and "tool_name" not in value:
        return call_of(value, "parameters")
    if not isinstance(value, dict) or "tool_name" not in value:
        raise Fault('a call is an object with "tool_name" and "parameters"')
    return make_call(value["tool_name"], value.get("parameters", {}), "parameters")


def only_key(value: Any) -> ToolCall:
    """A call of Apertus: the name is the only key."""
    if not isinstance(value, dict) or len(value) != 1:
        raise Fault('a call is an object with one key, its name: {"name": {...}}')
    [(name, arguments)] = value.items()
    return make_call(name, arguments)


def read_values(text: str, position: int, call: Callable[[Any], ToolCall] = call_of) -> tuple[list[ToolCall], int]:
    """The calls of a JSON list, or of objects one after another, and the position after them."""
    value, position = read_json(text, position)
    if isinstance(value, list):
        return [call(item) for item in value], position
    calls = [call(value)]
    while True:
        start = skip_space(text, position + 1) if text[position : position + 1] in (",", ";") else position
        if not text.startswith("{", start):
            return calls, position
        value, position = read_json(text, start)
        calls.append(call(value))


def reader_of(
    begin: str,
    end: Sequence[str] = (),
    *,
    call: Callable[[Any], ToolCall] = call_of,
    bare: re.Pattern[str] | None = None,
    marks: tuple[str, str] = (THINK, CLOSED),
    help_text: str = "",
) -> Reader:
    """A reader of JSON after a pattern; the closing marks may be missing. `bare` finds calls that begin the answer
    without a mark."""
    mark = re.compile(begin)

    def block(text: str, position: int) -> tuple[list[ToolCall], int]:
        calls, position = read_values(text, position, call)
        if not calls:
            raise Fault("the list has no call")
        for closing in end:
            position = position + len(closing) if text.startswith(closing, position) else position
        return calls, position

    def read(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        thinking, answer = split_thinking(text, marks, mark)
        if bare is not None and mark.search(answer) is None and bare.match(answer):
            return read_bare(answer, thinking, call, help_text)
        return read_blocks(answer, mark, block, thinking, help_text)

    return read


def read_bare(answer: str, thinking: str, call: Callable[[Any], ToolCall], help_text: str) -> Message:
    """Calls at the start of an answer. JSON that holds no call is an answer."""
    try:
        calls, end = read_values(answer, 0, call)
    except Fault as fault:
        if '"name"' not in answer[:200]:
            return Message("assistant", answer, thinking)
        raise Fault(f"a tool call could not be read: {fault}; {help_text}") from None
    return spoken_with(thinking, ["", answer[end:]], calls) if calls else Message("assistant", answer, thinking)


def read_cohere(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    """Calls of Command R7B and A; what is said stands between marks of its own."""
    return COHERE_ACTIONS(COHERE_MARKS.sub("", text), tools)


def read_xlam(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    """A list of calls that begins the answer, a code block with one, or one after a mark of another family."""
    thinking, answer = split_thinking(text)
    if BARE_LIST.match(answer):
        return read_bare(answer, thinking, call_of, XLAM_HELP)
    if (code := CODE.search(answer)) is not None:
        try:
            calls, end = read_values(answer, code.end())
        except Fault:
            return Message("assistant", answer, thinking)  # a code block of an answer
        rest = answer[end:].removeprefix("```")
        return spoken_with(thinking, [answer[: code.start()], rest], calls)
    return XLAM_MARKED(text, tools)


def marked(begin: str, end: str) -> str:
    return OBJECTS.format(begin=begin, end=end)


def format_of_json(begin: str, end: Sequence[str], help_text: str, **more: Any) -> Format:
    return Format(reader_of(begin, end, help_text=help_text, **more), help_text=help_text)


XLAM_HELP = marked("", "")
XLAM_MARKED = reader_of(r"\[TOOL_CALLS\]\s*(?=\[)|<tool_call>\s*(?=\[)", ["</tool_call>"], help_text=XLAM_HELP)
COHERE_HELP = 'write <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>'
COHERE_ACTIONS = reader_of(
    r"<\|START_ACTION\|>", ["<|END_ACTION|>"], call=named_tool, marks=COHERE_THINKING, help_text=COHERE_HELP
)
GRANITE = format_of_json(
    r"<\|tool_call\|>|<tool_call>\s*(?=\[)", ["</tool_call>"], marked("<|tool_call|>", ""), bare=BARE_LIST
)
GRANITE_20B = format_of_json(r"<function_call>", [], 'write <function_call> {"name": ..., "arguments": {...}}')
NEMOTRON = format_of_json("<TOOLCALL>", ["</TOOLCALL>"], marked("<TOOLCALL>", "</TOOLCALL>"))
JAMBA = format_of_json("<tool_calls>", ["</tool_calls>"], marked("<tool_calls>", "</tool_calls>"))
COHERE = Format(read_cohere, thinking=COHERE_THINKING, help_text=COHERE_HELP)
PHI4 = format_of_json(
    r"functools(?=\s*[\[{])|<\|tool_call\|>", ["<|/tool_call|>"], marked("functools", ""), bare=BARE_OBJECT
)
INTERNLM = format_of_json(
    r"<\|action_start\|>\s*<\|plugin\|>",
    ["<|action_end|>"],
    'write <|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>',
)
APERTUS = format_of_json(
    r"<\|tools_prefix\|>",
    ["<|tools_suffix|>"],
    'write <|tools_prefix|>[{"name": {...}}]<|tools_suffix|>',
    call=only_key,
)
GIGACHAT = format_of_json(
    r"<\|function_call\|>|<\|message_sep\|>\s*function call<\|role_sep\|>\n",
    [],
    'write <|function_call|>{"name": ..., "arguments": {...}}',
)
XLAM = Format(read_xlam, help_text=XLAM_HELP)
