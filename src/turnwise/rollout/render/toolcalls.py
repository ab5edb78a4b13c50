"""Tool calls in text: what a format is, and the parts that the readers of all formats share.

A format reads the text of an action into a message with thinking, content and calls. The text is hostile input: reading
never raises and takes linear time, and a text that cannot be read becomes a message whose `fault` tells the model what
to write instead. Faults do not quote the model's text. What hard cases become is a table in docs/reference/tools.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.messages import Message, ToolCall, ToolSpec

DEEPEST = 32
"""The deepest nesting of the arguments of a call."""
LARGEST = 2**63
LONGEST_NAME = 128
MOST_NAMED = 20
"""The names of tools that a fault lists."""
MOST_BROKEN = 8
"""The calls of a message that may be broken beside others that are read."""
SPACE = re.compile(r"\s*")

THINK, CLOSED = "<think>", "</think>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class Fault(ValueError):
    """A message cannot be read. The text is for the model."""


class Reader(Protocol):
    """Reads the text of an action; raises Fault. The tools are those that were offered, for values without types."""

    def __call__(self, text: str, tools: Sequence[ToolSpec], /) -> Message: ...


def nothing_more(text: str) -> str:
    return text


def plain_id(call: ToolCall, number: int, total: int) -> str:
    """The id of the call with this number in its message and in the conversation. Some templates print ids, and some of
    those require nine letters and digits."""
    return f"call{number:05d}"


@dataclass(frozen=True, slots=True)
class Format:
    """How calls are written in text."""

    read: Reader
    write: Callable[[Message], str] | None = None
    """The text of a message's content and calls; None if only a chat template can write them."""
    offer: Callable[[Sequence[ToolSpec]], str] | None = None
    """The description of the tools for the model; None if only a chat template can write it."""
    clean: Callable[[str], str] = nothing_more
    """A text that could not be read, without the parts that a chat template would refuse."""
    tags: frozenset[str] = frozenset()
    """Control tokens of an action besides those of thinking and calls."""
    ends: frozenset[str] = frozenset()
    """Tokens that end an action, which the reader takes for a part of it."""
    thinking: tuple[str, str] = (THINK, CLOSED)
    """What opens and closes thinking."""
    make_id: Callable[[ToolCall, int, int], str] = plain_id
    """The id that a template gets with a call."""
    help_text: str = ""
    """How to write a call, for a description of tools."""
    openings: tuple[str, ...] = ("<", "[", "{", "`", "\u25c1", "\u273f", "functions.", "functools")
    """Texts that may open a call, thinking or another part that is not content. What stands before the first of them is
    content for certain, and is streamed to clients while the rest is sampled."""

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        """The message of a text, or a message with the text and its fault. A call to a tool that is not offered has a
        fault; where nothing is offered, every name counts."""
        try:
            return with_names_checked(self.read(text, tools), tools)
        except ValueError as fault:  # our readers raise Fault; a user's may raise what int() and json.loads() raise
            return Message("assistant", self.clean(text), fault=str(fault) or "the message cannot be read")


def general_offer(tools: Sequence[ToolSpec], help_text: str) -> str:
    """A description of tools for a format whose model knows none of its own, or whose template does not write it."""
    offered = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
    return f"You may call functions. To call one, {help_text}. The functions, in JSON:\n{offered}"


# ---------------------------------------------------------------- the parts of a message


def split_thinking(
    text: str,
    marks: tuple[str, str] = (THINK, CLOSED),
    calls: re.Pattern[str] | None = None,
    *,
    call_ends_it: bool = True,
) -> tuple[str, str]:
    """(thinking, the rest) of a text that may begin with thinking; its opening mark may be in the prompt. `calls` finds
    the opening mark of a call: with `call_ends_it`, it ends thinking that is never closed."""
    opening, closing = marks
    inside, tag, answer = text.partition(closing)
    opened = inside.lstrip().startswith(opening)
    call = None if calls is None else calls.search(inside)
    if not tag and opened:
        if call is None or not call_ends_it:
            raise Fault(f"the thinking does not end; close it with {closing} and then answer")
        return inside[: call.start()].lstrip().removeprefix(opening).strip("\n"), inside[call.start() :]
    if not tag or (not opened and call is not None):
        return "", text
    return (inside.lstrip().removeprefix(opening) if opened else inside).strip("\n"), answer.lstrip("\n")


def join_thinking(thinking: str, content: str, marks: tuple[str, str] = (THINK, CLOSED)) -> str:
    """The inverse of `split_thinking`, in the form of templates."""
    return f"{marks[0]}\n{thinking}\n{marks[1]}\n\n{content}" if thinking else content


def spoken_with(thinking: str, outside: Sequence[str], calls: Sequence[ToolCall]) -> Message:
    """The message with these calls and the texts before, between and after them."""
    first, *later = outside or [""]
    # The template writes the white space around calls.
    content = [part for part in (first.rstrip(), *(other.strip() for other in later)) if part]
    return Message("assistant", "\n".join(content), thinking, tuple(calls))


def with_names_checked(message: Message, tools: Sequence[ToolSpec]) -> Message:
    """A message whose calls to tools that are not offered have faults."""
    names = [tool.name for tool in tools]
    if not names or all(call.name in names for call in message.calls):
        return message
    more = ", ..." if len(names) > MOST_NAMED else ""
    fault = f"there is no such tool; there are {', '.join(names[:MOST_NAMED])}{more}"
    calls = tuple(call if call.name in names else replace_fault(call, fault) for call in message.calls)
    return replace(message, calls=calls)


def replace_fault(call: ToolCall, fault: str) -> ToolCall:
    return ToolCall(call.name, call.arguments, fault)


Block = Callable[[str, int], tuple[list[ToolCall], int]]
"""Reads the calls after an opening mark: (text, position after it) -> (calls, position after the closing mark)."""


def read_blocks(answer: str, begin: re.Pattern[str], block: Block, thinking: str, help_text: str) -> Message:
    """A message with any number of blocks of calls, each after a match of `begin`. The text of a block that cannot be
    read is content, up to the next one; if no block can be read, the whole message is at fault."""
    calls: list[ToolCall] = []
    outside: list[str] = []
    faults: list[Fault] = []
    kept = position = 0
    while (mark := begin.search(answer, position)) is not None:
        try:
            found, after = block(answer, mark.end())
        except Fault as fault:
            faults.append(fault)
            if len(faults) > MOST_BROKEN:  # each of them may have been read up to the end of the text
                calls.clear()
                break
            position = max(mark.end(), mark.start() + 1)
            continue
        outside.append(answer[kept : mark.start()])
        calls += found
        kept = position = after
    unread = f"a tool call could not be read: {faults[0]}; {help_text}" if faults else ""
    if unread and not calls:
        raise Fault(unread)
    if not calls:
        return Message("assistant", answer, thinking)
    return replace(spoken_with(thinking, [*outside, answer[kept:]], calls), fault=unread)


def one_of(marks: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the marks."""
    return re.compile("|".join(map(re.escape, marks)))


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
    object_pairs_hook=unique,
    parse_int=whole_number,
    parse_float=real_number,
    parse_constant=no_number,
    strict=False,  # models write line breaks within strings
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


def make_call(name: Any, arguments: Any, key: str = "arguments") -> ToolCall:
    if not is_name(name):
        raise Fault('"name" must be the name of a tool')
    if not isinstance(arguments, dict):
        raise Fault(f'"{key}" must be an object, {{}} if there is nothing to give')
    return ToolCall(name, arguments)


def is_name(name: Any) -> bool:
    """Whether a value can be the name of a tool: any printable text without marks of tags."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= LONGEST_NAME
        and name.isprintable()
        and name == name.strip()
        and any(map(str.isalnum, name))
        and not {"<", ">"} & set(name)
    )


def call_of(value: Any, key: str = "arguments") -> ToolCall:
    """The call that a JSON object with a name and arguments (or parameters) means."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or "name" not in value or not {"arguments", "parameters"} & value.keys():
        raise Fault(f'a call is an object with "name" and "{key}"')
    return make_call(value["name"], value.get("arguments", value.get("parameters")), key)


def call_text(call: ToolCall, key: str) -> str:
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.text}}}'
