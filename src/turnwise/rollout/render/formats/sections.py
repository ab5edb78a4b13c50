"""Calls between control tokens, with a header and JSON: DeepSeek V3, R1 and V3.1, and Kimi-K2.

deepseek    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
            ```json
            {...}
            ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
            since V3.1 <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
kimi_k2     <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}
            <|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.formats.coerce import properties_of
from turnwise.rollout.render.toolcalls import (
    Fault,
    Format,
    make_call,
    read_blocks,
    read_json,
    split_thinking,
)

DEEPSEEK_BEGIN = re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>|<｜tool▁calls▁begin｜>")
DEEPSEEK_END = re.compile(r"\s*<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?")
DEEPSEEK_HEADER = re.compile(
    r"\s{0,8}(function\s{0,8}<｜tool▁sep｜>)?\s{0,8}([^<\n{`]{1,200}?)[ \t]{0,8}(?:<｜tool▁sep｜>|\n)\s{0,8}"
)
FENCE = re.compile(r"```(?:json)?\s*")
KIMI_BEGIN = re.compile(r"(?:<\|tool_calls?_section_begin\|>\s*)?<\|tool_call_begin\|>|<\|tool_calls?_section_begin\|>")
KIMI_END = re.compile(r"\s*<\|tool_call_end\|>\s*(?:<\|tool_calls?_section_end\|>)?")
KIMI_HEADER = re.compile(r"\s{0,16}([^<]{0,300}?)\s{0,16}<\|tool_call_argument_begin\|>\s*")
DEEPSEEK_HELP = (
    "write <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI_HELP = (
    "write <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)


def read_deepseek(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    thinking, answer = split_thinking(text, calls=DEEPSEEK_BEGIN)
    return read_blocks(answer, DEEPSEEK_BEGIN, read_deepseek_call, thinking, DEEPSEEK_HELP)


def read_deepseek_call(text: str, position: int) -> tuple[list[ToolCall], int]:
    header = DEEPSEEK_HEADER.match(text, position)
    if header is None:
        raise Fault("a call has a name and then its arguments")
    start = header.end()
    fence = FENCE.match(text, start)
    if header[1] and fence is None:  # only V3.1 writes arguments without one
        raise Fault("the arguments stand in a code block that begins with ```json")
    start = fence.end() if fence else start
    arguments, position = read_json(text, start)
    if fence and (closing := FENCE.match(text, position)):
        position = closing.end()
    call = make_call(header[2], arguments)
    return [call], after(DEEPSEEK_END, text, position, "<｜tool▁call▁end｜>")


def read_kimi(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    def block(answer: str, position: int) -> tuple[list[ToolCall], int]:
        header = KIMI_HEADER.match(answer, position)
        if header is None:
            raise Fault("a call has a name and then its arguments")
        arguments: Any = {}
        end = header.end()
        if not answer.startswith("<|tool_call_end|>", end):
            arguments, end = read_json(answer, end)
        call = make_call(name_of(header[1], arguments, tools), arguments)
        return [call], after(KIMI_END, answer, end, "<|tool_call_end|>")

    thinking, answer = split_thinking(text, calls=KIMI_BEGIN)
    return read_blocks(answer, KIMI_BEGIN, block, thinking, KIMI_HELP)


def after(end: re.Pattern[str], text: str, position: int, mark: str) -> int:
    """The position after the mark that closes a call, and after that of its section, which may be missing."""
    if (found := end.match(text, position)) is None:
        raise Fault(f"a call must be closed with {mark}, with nothing between")
    return found.end()


def name_of(header: str, arguments: object, tools: Sequence[ToolSpec]) -> str:
    """The name in an id such as functions.get:0. An id that is only a number means the tool whose arguments fit."""
    if header.isdecimal() and isinstance(arguments, dict):
        fitting = [tool for tool in tools if arguments.keys() <= properties_of(tools, tool.name).keys()]
        best = [tool.name for tool in fitting if set(tool.parameters.get("required", ())) <= arguments.keys()]
        if len(tools) == 1 or len(best) == 1:
            return best[0] if len(best) == 1 else tools[0].name
        raise Fault("a call has no name")
    name, _, number = header.rpartition(":")
    if number.isdecimal() and name:
        return name.removeprefix("functions.").strip()
    plain = header.removeprefix("functions.").strip()
    if plain not in {tool.name for tool in tools} and (tools or plain != header):
        raise Fault("the id of a call is functions.NAME:NUMBER")
    return plain


def kimi_id(call: ToolCall, number: int, total: int) -> str:
    """Kimi counts the calls of a whole conversation."""
    return f"functions.{call.name}:{total}"


DEEPSEEK = Format(read_deepseek, help_text=DEEPSEEK_HELP)
KIMI_K2 = Format(read_kimi, make_id=kimi_id, help_text=KIMI_HELP)
