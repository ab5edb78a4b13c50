"""Tool calls: parses the text of a model into structured calls, and writes structured calls as text.

A format parses the text of an action into a message with thinking, content and calls. The text is hostile input:
parsing never raises, and a text that cannot be parsed becomes a message whose `fault` tells the model what to write
instead. Faults do not quote the model's text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.messages import TOOL_NAME, Message, ToolCall, ToolSpec

DEEPEST = 32
"""The deepest nesting of the arguments of a call."""
LARGEST = 2**63
SPACE = re.compile(r"\s*")

THINK, CLOSED = "<think>", "</think>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
HERMES_CALL = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
LLAMA_CALL = '{"name": ..., "parameters": {...}}'


class Fault(Exception):
    """A message cannot be parsed. The text is for the model."""


@dataclass(frozen=True, slots=True)
class Format:
    """How calls are written in text."""

    read: Callable[[str], Message]
    """Parses a text into a message; raises Fault."""
    write: Callable[[Message], str] | None = None
    """The text of a message's content and calls; None if only a chat template can write them."""
    offer: Callable[[Sequence[ToolSpec]], str] | None = None
    """The description of the tools for the model; None if only a chat template can write it."""
    clean: Callable[[str], str] = lambda text: text
    """A text that could not be parsed, without the parts that a chat template would refuse."""
    tags: frozenset[str] = frozenset()
    """Control tokens of an action besides those of thinking and calls."""
    openings: tuple[str, ...] = ("<", "[", "{", "`", "\u25c1", "\u273f", "functions.")
    """Texts that may open a call, thinking or another part that is not content. What stands before the first of them is
    content for certain, and is streamed to clients while the rest is sampled."""

    def parse(self, text: str) -> Message:
        """The message of a text, or a message with the text and its fault."""
        try:
            return self.read(text)
        except Fault as fault:
            return Message("assistant", self.clean(text), fault=str(fault))


# ---------------------------------------------------------------- JSON


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise Fault("an object has the same key twice")
    return fields


def whole_number(text: str) -> int:
    if len(text) > 20 or not -LARGEST <= (number := int(text)) < LARGEST:
        raise Fault("a whole number has more than 64 bits")
    return number


def real_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise Fault("a number is too large")
    return number


def no_number(text: str) -> Any:
    raise Fault(f"{text} is not JSON")


DECODER = json.JSONDecoder(
    object_pairs_hook=unique, parse_int=whole_number, parse_float=real_number, parse_constant=no_number
)


def read_json(text: str, position: int) -> tuple[Any, int]:
    """(the JSON value at `position`, the position after it)."""
    try:
        value, end = DECODER.raw_decode(text, skip_space(text, position))
        check_value(value)
    except json.JSONDecodeError as error:
        raise Fault(f"it is not JSON: {error.msg}, at character {error.pos - position}") from None
    except RecursionError:
        raise Fault("it is nested too deeply") from None
    return value, skip_space(text, end)


def skip_space(text: str, position: int) -> int:
    match = SPACE.match(text, position)
    return match.end() if match else position


def check_value(value: Any, deepest: int = DEEPEST) -> None:
    """Refuse nesting that is too deep for other code, and strings that are not valid text."""
    level = [value]
    for _ in range(deepest):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item)
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            elif isinstance(item, str) and not is_text(item):
                raise Fault("a string has half of a surrogate pair")
        if not inner:
            return
        level = inner
    raise Fault("it is nested too deeply")


def is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def make_call(name: Any, arguments: Any, key: str) -> ToolCall:
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise Fault('"name" must be the name of a tool: letters, digits, "_", "-" and "."')
    if not isinstance(arguments, dict):
        raise Fault(f'"{key}" must be an object, {{}} if there is nothing to give')
    return ToolCall(name, arguments)


def call_text(call: ToolCall, key: str) -> str:
    return f'{{"name": "{call.name}", "{key}": {call.text}}}'


# ---------------------------------------------------------------- Hermes and Qwen


def read_hermes(text: str) -> Message:
    """Text with any number of <tool_call>{"name": ..., "arguments": {...}}</tool_call> in it."""
    thinking, answer = split_thinking(text)
    calls: list[ToolCall] = []
    outside: list[str] = []
    position = 0
    while (start := answer.find(OPEN, position)) >= 0:
        outside.append(answer[position:start])
        call, position = read_tagged(answer, start + len(OPEN))
        calls.append(call)
    outside.append(answer[position:])
    if any(CLOSE in part for part in outside):
        raise Fault(f"{CLOSE} closes nothing; write a call as {HERMES_CALL}")
    if not calls:
        return Message("assistant", answer, thinking)
    first, *later = outside
    # The template writes the white space around calls.
    spoken = [part for part in (first.rstrip(), *(other.strip() for other in later)) if part]
    return Message("assistant", "\n".join(spoken), thinking, tuple(calls))


def read_tagged(text: str, position: int) -> tuple[ToolCall, int]:
    """(the call whose JSON begins at `position`, the position after its closing tag)."""
    try:
        value, end = read_json(text, position)
        if not isinstance(value, dict) or not {"name", "arguments"} <= value.keys():
            raise Fault('a call is an object with "name" and "arguments"')
        if not text.startswith(CLOSE, end):
            raise Fault(f"a call must be closed with {CLOSE}, with nothing between")
        return make_call(value["name"], value["arguments"], "arguments"), end + len(CLOSE)
    except Fault as fault:
        raise Fault(f"a tool call could not be read: {fault}; write {HERMES_CALL}") from None


def split_thinking(text: str) -> tuple[str, str]:
    """(thinking, the rest) of a text that may begin with <think>...</think>; the first tag may be in the prompt."""
    inside, tag, answer = text.partition(CLOSED)
    opened = inside.lstrip().startswith(THINK)
    if not tag and opened:
        raise Fault(f"the thinking does not end; close it with {CLOSED} and then answer")
    if not tag or (not opened and OPEN in inside):
        return "", text
    return (inside.lstrip().removeprefix(THINK) if opened else inside).strip("\n"), answer.lstrip("\n")


def join_thinking(thinking: str, content: str) -> str:
    """The inverse of `split_thinking`, in the form of templates."""
    return f"{THINK}\n{thinking}\n{CLOSED}\n\n{content}" if thinking else content


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


# ---------------------------------------------------------------- Llama


def read_llama(text: str) -> Message:
    """Nothing but {"name": ..., "parameters": {...}}, several separated by ";", after an optional <|python_tag|>."""
    body = text.strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG)
    if not tagged and not re.match(r'\{\s*"', body):
        return Message("assistant", text)
    calls: list[ToolCall] = []
    position = 0
    try:
        while True:
            value, position = read_json(body, position)
            parameters = value.get("parameters", value.get("arguments")) if isinstance(value, dict) else None
            if not isinstance(value, dict) or "name" not in value:
                if not tagged and not calls and position == len(body):
                    return Message("assistant", text)  # an answer that is JSON
                raise Fault('a call is an object with "name" and "parameters"')
            calls.append(make_call(value["name"], parameters, "parameters"))
            if position == len(body):
                return Message("assistant", "", calls=tuple(calls))
            if body[position] != ";":
                raise Fault("nothing may follow a call but another, after a semicolon")
            position += 1
    except Fault as fault:
        raise Fault(f"a tool call could not be read: {fault}; write {LLAMA_CALL} and nothing else") from None


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
