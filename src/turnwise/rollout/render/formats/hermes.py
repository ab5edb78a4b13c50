"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere in a text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.toolcalls import (
    CLOSE,
    CLOSED,
    OPEN,
    THINK,
    Fault,
    Format,
    call_of,
    call_text,
    read_blocks,
    read_json,
    split_thinking,
)

BEGIN = re.compile(re.escape(OPEN))
HELP = 'write <tool_call>{"name": ..., "arguments": {...}}</tool_call>'


def read_hermes(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    thinking, answer = split_thinking(text, calls=BEGIN, call_ends_it=False)
    message = read_blocks(answer, BEGIN, read_tagged, thinking, HELP)
    if CLOSE in message.content and not message.fault:
        raise Fault(f"{CLOSE} closes nothing; {HELP}")
    return message


def read_tagged(text: str, position: int) -> tuple[list[ToolCall], int]:
    """The call whose JSON begins at `position`. At the end of the text its closing tag may be missing, as in vLLM and
    SGLang's detector for Hermes: nothing of the call is."""
    value, end = read_json(text, position)
    call = call_of(value)
    if end == len(text):
        return [call], end
    if not text.startswith(CLOSE, end):
        raise Fault(f"a call must be closed with {CLOSE}, with nothing between")
    return [call], end + len(CLOSE)


def offer_hermes(tools: Sequence[ToolSpec]) -> str:
    """The description of tools in Qwen's templates."""
    offered = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{offered}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{OPEN}{CLOSE} XML tags:\n{OPEN}\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n' + CLOSE
    )


def write_hermes(message: Message) -> str:
    calls = [f"{OPEN}\n{call_text(call, 'arguments')}\n{CLOSE}" for call in message.calls]
    return "\n".join([message.content, *calls] if message.content else calls)


HERMES = Format(read_hermes, write_hermes, offer_hermes, openings=(OPEN, CLOSE, THINK, CLOSED))
