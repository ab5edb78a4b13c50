"""Calls as Gemma writes them: call:NAME{key:value,...} between marks, with marks of their own around strings.

gemma           <|tool_call>call:get{name:<|"|>amber<|"|>,links:2}<tool_call|>; Gemma 4
functiongemma   <start_function_call>call:get{name:<escape>amber<escape>}<end_function_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.formats.coerce import coerced, guessed, properties_of, types_of
from turnwise.rollout.render.toolcalls import (
    CLOSED,
    DEEPEST,
    THINK,
    Fault,
    Format,
    Reader,
    check_value,
    make_call,
    one_of,
    read_blocks,
    skip_space,
    split_thinking,
)

CALL = re.compile(r"\s*call:\s*([^\s{<]{1,128})\s*\{")
KEY = re.compile(r"\s*([^:{}\[\],<]{1,200}?)\s*:\s*")
BARE = re.compile(r"[^,{}\[\]<]+")
GEMMA_THINKING = ("<|channel>thought", "<channel|>")


def reader_of_gemma(begin: str, end: str, quote: str, marks: tuple[str, str], *, all_quoted: bool) -> Reader:
    mark = one_of([begin])

    def read(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        def block(answer: str, position: int) -> tuple[list[ToolCall], int]:
            calls: list[ToolCall] = []
            while (name := CALL.match(answer, position)) is not None:
                properties = properties_of(tools, name[1])
                arguments, position = read_fields(answer, name.end(), quote, DEEPEST)
                position = skip_space(answer, position)
                values = {
                    key: settled(value, properties.get(key), all_quoted=all_quoted) for key, value in arguments.items()
                }
                check_value(values)
                calls.append(make_call(name[1], values))
            if not calls:
                raise Fault("a call begins with call:NAME{")
            if position == len(answer):  # whole calls whose mark is missing, which all but SGLang read
                return calls, position
            if not answer.startswith(end, position):
                raise Fault(f"a call must be closed with {end}")
            return calls, position + len(end)

        thinking, answer = split_thinking(text, marks, mark)
        return read_blocks(answer, mark, block, thinking, f"write {begin}call:NAME{{key:{quote}value{quote}}}{end}")

    return read


class Written(str):
    """A value without marks of a string: a number, a constant, or a string of a tool whose schema says so."""

    __slots__ = ()


def settled(value: Any, schema: Any, *, all_quoted: bool) -> Any:
    """A value with its type: by the schema, or else by how it is written. Where all values are quoted, quotes make no
    string."""
    if isinstance(value, Written):
        return coerced(value, schema) if types_of(schema) else guessed(value)
    if isinstance(value, str):
        types = types_of(schema)
        return coerced(value, schema) if all_quoted and types and "string" not in types else value
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [settled(item, items, all_quoted=all_quoted) for item in value]
    fields = schema.get("properties") if isinstance(schema, dict) else None
    known = fields if isinstance(fields, dict) else {}
    return {key: settled(item, known.get(key), all_quoted=all_quoted) for key, item in value.items()}


def read_fields(text: str, position: int, quote: str, deepest: int) -> tuple[dict[str, Any], int]:
    """The fields down to the closing brace; at the end of the text it may be missing."""
    fields: dict[str, Any] = {}
    key: str
    while True:
        position = skip_space(text, position)
        if text.startswith("}", position):
            return fields, position + 1
        if position == len(text) or not deepest:
            raise Fault("an object does not end" if deepest else "it is nested too deeply")
        if text.startswith(quote, position):
            key, position = read_quoted(text, position, quote)
            position = skip_space(text, position)
            if not text.startswith(":", position):
                raise Fault("a field is key:value")
            position += 1
        elif found := KEY.match(text, position):
            key, position = found[1].strip("\"'"), found.end()
        else:
            raise Fault("a field is key:value")
        if key in fields:
            raise Fault("an object has the same key twice")
        fields[str(key)], position = read_value(text, position, quote, deepest - 1)
        position = after_item(text, position, "}")


def read_value(text: str, position: int, quote: str, deepest: int) -> tuple[Any, int]:
    position = skip_space(text, position)
    if text.startswith(quote, position):
        return read_quoted(text, position, quote)
    if text.startswith("{", position):
        return read_fields(text, position + 1, quote, deepest)
    if text.startswith("[", position):
        items: list[Any] = []
        position = skip_space(text, position + 1)
        while not text.startswith("]", position):
            if not deepest:
                raise Fault("it is nested too deeply")
            item, position = read_value(text, position, quote, deepest - 1)
            items.append(item)
            position = after_item(text, position, "]")
        return items, position + 1
    bare = BARE.match(text, position)
    if bare is None:
        raise Fault("a field has no value")
    return Written(bare[0].strip()), bare.end()


def read_quoted(text: str, position: int, quote: str) -> tuple[str, int]:
    start = position + len(quote)
    end = text.find(quote, start)
    if end < 0:
        raise Fault("a string does not end")
    return text[start:end], end + len(quote)


def after_item(text: str, position: int, closing: str) -> int:
    """The position of the next item or of the closing bracket."""
    position = skip_space(text, position)
    if text.startswith(",", position):
        return skip_space(text, position + 1)
    if not text.startswith(closing, position):
        raise Fault(f"a comma or {closing} is missing")
    return position


def format_of_gemma(begin: str, end: str, quote: str, marks: tuple[str, str], *, all_quoted: bool) -> Format:
    help_text = f"write {begin}call:NAME{{key:{quote}value{quote}}}{end}"
    return Format(
        reader_of_gemma(begin, end, quote, marks, all_quoted=all_quoted),
        tags=frozenset({quote}),
        thinking=marks,
        help_text=help_text,
    )


GEMMA = format_of_gemma("<|tool_call>", "<tool_call|>", '<|"|>', GEMMA_THINKING, all_quoted=False)
FUNCTION_GEMMA = format_of_gemma(
    "<start_function_call>", "<end_function_call>", "<escape>", (THINK, CLOSED), all_quoted=True
)
