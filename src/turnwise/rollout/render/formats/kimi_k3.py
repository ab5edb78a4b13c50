"""Calls as Kimi-K3 writes them: channels of tags made of three control tokens, and an argument's tag says its type.

<|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
<|open|>tools<|sep|><|open|>call tool="get" index="1"<|sep|>
<|open|>argument key="name" type="string"<|sep|>amber<|close|>argument<|sep|><|close|>call<|sep|>
<|close|>tools<|sep|><|close|>message<|sep|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.formats.coerce import guessed
from turnwise.rollout.render.toolcalls import (
    MOST_BROKEN,
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
    outside, calls, faults = read_channels(answer)
    unread = f"a tool call could not be read: {faults[0]}; {HELP}" if faults else ""
    if unread and (not calls or len(faults) > MOST_BROKEN):
        raise Fault(unread)
    if calls:
        return replace(spoken_with(thinking, outside, calls), fault=unread)
    return Message("assistant", "".join(outside), thinking)


def read_channels(text: str) -> tuple[list[str], list[ToolCall], list[Fault]]:
    """(what is said, the calls, what is wrong with other calls) of an answer. The text of a call that cannot be read is
    said."""
    outside: list[str] = []
    calls: list[ToolCall] = []
    faults: list[Fault] = []
    call: OpenCall | None = None
    position = 0
    in_tools = False
    for mark in MARK.finditer(text):
        way, channel = mark[1], mark[2]
        if call is not None and call.takes(text, mark):
            pass
        elif channel == "call" and way == "open":
            if call is not None:
                faults.append(Fault("a call does not end"))
                outside.append(text[call.start : mark.start()])
            call = OpenCall(mark.start(), unescaped(dict(ATTRIBUTE.findall(mark[3])).get("tool", "")))
        elif channel == "call" and call is not None:
            try:
                calls.append(call.closed())
            except Fault as fault:
                faults.append(fault)
                outside.append(text[call.start : mark.end()])
            call = None
        elif not in_tools:
            outside.append(text[position : mark.start()])
        if channel == "tools":
            in_tools = way == "open"
        position = mark.end()
    rest = text[position:]
    if call is not None:
        faults.append(Fault("a call does not end"))
        outside.append(text[call.start :])
    elif not in_tools:
        cut = CUT.search(rest[-64:])
        outside.append(rest[: len(rest) - len(cut[0])] if cut else rest)
    return outside, calls, faults


@dataclass(slots=True)
class OpenCall:
    """A call that is being read."""

    start: int
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fault: Fault | None = None
    key: str = ""
    kind: str = ""
    value: int = -1
    """Where the open value begins; -1 between values."""

    def takes(self, text: str, mark: re.Match[str]) -> bool:
        """Whether a mark belongs to an argument of this call. Within a value all marks but its closing tag are text."""
        way, channel = mark[1], mark[2]
        if self.value >= 0:
            if (way, channel) == ("close", "json" if self.kind == "json" else "argument"):
                self.put(text[self.value : mark.start()])
                self.value = -1
            return True
        if way == "close" or channel not in ("argument", "json"):
            return False
        attributes = dict(ATTRIBUTE.findall(mark[3]))
        self.key = unescaped(attributes.get("key", ""))
        self.kind = "json" if channel == "json" else attributes.get("type", "string")
        self.value = mark.end()
        return True

    def put(self, text: str) -> None:
        """Add one argument, or all of them where they are one JSON object."""
        try:
            if self.kind == "json":
                self.arguments.update(whole_object(text))
            elif self.key in self.arguments:
                raise Fault("an argument is given twice")
            else:
                self.arguments[self.key] = text if self.kind == "string" else guessed(text)
        except Fault as fault:
            self.fault = self.fault or fault

    def closed(self) -> ToolCall:
        if self.fault is not None:
            raise self.fault
        check_value(self.arguments)
        return call_of_k3(self.name, self.arguments)


def call_of_k3(name: str, arguments: dict[str, Any]) -> ToolCall:
    """A call. Names stand in quotes here, so they may have < and >, as long as these make no control token."""
    if "<|" not in name and is_name(name.replace("<", "(").replace(">", ")")):
        return ToolCall(name, arguments)
    return make_call(name, arguments)


def whole_object(text: str) -> dict[str, Any]:
    """The arguments of a call that are written as one JSON object."""
    value = guessed(text)
    if not isinstance(value, dict):
        raise Fault("the arguments are one JSON object")
    return value


def unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


KIMI_K3 = Format(read_kimi_k3, tags=frozenset({"<|open|>", "<|close|>", "<|sep|>"}), thinking=MARKS, help_text=HELP)
