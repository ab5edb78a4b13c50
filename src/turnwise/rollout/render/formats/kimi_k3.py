"""Calls as Kimi-K3 writes them: channels of tags made of three control tokens, and an argument's tag says its type.

<|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
<|open|>tools<|sep|><|open|>call tool="get" index="1"<|sep|>
<|open|>argument key="name" type="string"<|sep|>amber<|close|>argument<|sep|><|close|>call<|sep|>
<|close|>tools<|sep|><|close|>message<|sep|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.formats.coerce import guessed
from turnwise.rollout.render.toolcalls import (
    Fault,
    Format,
    check_value,
    is_name,
    make_call,
    split_thinking,
    spoken_with,
)

MARK = re.compile(r"<\|(open|close)\|>\s{0,8}([a-z]{1,32})((?:[^<]|<(?!\|)){0,600})<\|sep\|>")
ATTRIBUTE = re.compile(r'(\w{1,32})="([^"]{0,400})"')
TOOLS = re.compile(r"<\|open\|>\s{0,8}tools\s{0,8}<\|sep\|>")
CUT = re.compile(r"<\|(?:open|close)\|>\s{0,8}[a-z]{0,32}\s{0,8}\Z")
MARKS = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
HELP = (
    'write <|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="KEY" type="string"<|sep|>'
    "value<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)


def read_kimi_k3(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    thinking, answer = split_thinking(text, MARKS, TOOLS)
    try:
        outside, calls = read_channels(answer)
    except Fault as fault:
        raise Fault(f"a tool call could not be read: {fault}; {HELP}") from None
    if calls:
        return spoken_with(thinking, outside, calls)
    return Message("assistant", "".join(outside), thinking)


def read_channels(text: str) -> tuple[list[str], list[ToolCall]]:
    """(what is said, the calls) of an answer."""
    outside: list[str] = []
    calls: list[ToolCall] = []
    name: str | None = None
    arguments: dict[str, Any] = {}
    key, kind, start = "", "", -1
    position = 0
    in_tools = False
    for mark in MARK.finditer(text):
        way, channel = mark[1], mark[2]
        if start >= 0:  # within a value only its own closing tag counts
            if (way, channel) != ("close", "json" if kind == "json" else "argument"):
                continue
            put(arguments, key, kind, text[start : mark.start()])
            start = -1
        elif channel in ("argument", "json") and way == "open" and name is not None:
            attributes = dict(ATTRIBUTE.findall(mark[3]))
            key, kind = unescaped(attributes.get("key", "")), attributes.get("type", "string")
            kind, start = ("json" if channel == "json" else kind), mark.end()
        elif channel == "call" and way == "open":
            name, arguments = unescaped(dict(ATTRIBUTE.findall(mark[3])).get("tool", "")), {}
        elif channel == "call" and name is not None:
            check_value(arguments)
            calls.append(call_of_k3(name, arguments))
            name = None
        elif not in_tools:
            outside.append(text[position : mark.start()])
        if channel == "tools":
            in_tools = way == "open"
        position = mark.end()
    if start >= 0 or name is not None:
        raise Fault("a call does not end")
    rest = text[position:]
    if cut := CUT.search(rest[-64:]):
        rest = rest[: len(rest) - len(cut[0])]
    if not in_tools:
        outside.append(rest)
    return outside, calls


def call_of_k3(name: str, arguments: dict[str, Any]) -> ToolCall:
    """A call. Names stand in quotes here, so they may have < and >, as long as these make no control token."""
    if "<|" not in name and is_name(name.replace("<", "(").replace(">", ")")):
        return ToolCall(name, arguments)
    return make_call(name, arguments)


def put(arguments: dict[str, Any], key: str, kind: str, text: str) -> None:
    """Add one argument, or all of them where they are one JSON object."""
    if kind == "json":
        value = guessed(text)
        if not isinstance(value, dict):
            raise Fault("the arguments are one JSON object")
        arguments.update(value)
    elif key in arguments:
        raise Fault("an argument is given twice")
    else:
        arguments[key] = text if kind == "string" else guessed(text)


def unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


KIMI_K3 = Format(read_kimi_k3, tags=frozenset({"<|open|>", "<|close|>", "<|sep|>"}), thinking=MARKS, help_text=HELP)
