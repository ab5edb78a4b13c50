"""Calls in tags, with a tag for each argument. Values have no types, so the schema of the tool coerces them.

qwen_xml    <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>; Qwen3-Coder, Qwen3.5,
            Nemotron 3, Step 3.5
seed_oss    the same with <seed:tool_call>
glm         <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>; GLM-4.5 and later
minimax     <minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke></minimax:tool_call>
dsml        <｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">value...;
            DeepSeek V3.2 and V4
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.rollout.render.formats.coerce import coerced, guessed, inferred, properties_of, types_of
from turnwise.rollout.render.toolcalls import (
    CLOSED,
    THINK,
    Fault,
    Format,
    Reader,
    call_of,
    check_value,
    make_call,
    read_blocks,
    read_json,
    skip_space,
    split_thinking,
)

Value = Callable[[str, str, Any], Any]
"""(attributes of the tag, text, schema) -> value."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format, as patterns; those of names have one group for the name."""

    begin: str
    """What begins a block of calls, or a call without its block."""
    end: str
    """What ends a block."""
    call: str
    close_call: str
    argument: str
    """Groups: the name, and further attributes."""
    close_argument: str
    single: bool = False
    """Whether a block has one call, whose closing tag ends the block."""
    trim: bool = False
    """Whether the template writes line breaks around a value."""
    open_ended: bool = False
    """Whether the end of the block may close its last call."""
    inferred: bool = False
    """Whether the template writes every value but strings as JSON, so that one which no schema declares is read so."""
    json: bool = False
    """Whether a block may have an object with "name" and "arguments" in place of tags."""
    help_text: str = ""
    marks: tuple[str, str] = (THINK, CLOSED)


ATTRIBUTE = r"""\s*=\s*(?:"([^"<>\n]{1,200})"|'([^'<>\n]{1,200})'|([^"'<>\s]{1,200}))"""


def typed(attributes: str, text: str, schema: Any) -> Any:
    return coerced(text, schema)


def told(attributes: str, text: str, schema: Any) -> Any:
    """A value whose tag says whether it is a string; a schema knows better."""
    if 'string="false"' in attributes and not types_of(schema):
        return guessed(text)
    return coerced(text, schema)


def reader_of_tags(tags: Tags, value: Value = typed) -> Reader:
    begin = re.compile(tags.begin)
    call = re.compile(rf"\s*{tags.call}")
    # One pass over the marks of a call: a value ends at its closing tag, or where the next tag of the call begins.
    inner = re.compile(
        f"(?P<argument>{tags.argument})|(?P<closed>{tags.close_argument})|(?P<done>{tags.close_call})|(?P<end>{tags.end})"
    )
    end = re.compile(rf"\s*{tags.end}")
    opening = tags.call if tags.call.startswith("<") else tags.begin
    ahead = re.compile(f"(?P<closed>{tags.close_argument})|{tags.argument}|{opening}")

    def read(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        def block(answer: str, position: int) -> tuple[list[ToolCall], int]:
            calls: list[ToolCall] = []
            if tags.json and answer.startswith("{", start := skip_space(answer, position)):
                written, position = read_json(answer, start)
                if not answer.startswith(tags.close_call, position):
                    raise Fault(f"a call must be closed with {tags.close_call}")
                return [call_of(written)], position + len(tags.close_call)
            while (name := call.match(answer, position)) is not None:
                try:
                    found, position = read_one(answer, name, (inner, ahead), tags, value, tools)
                except Fault:
                    if not calls:
                        raise
                    return calls, position  # the broken call is tried again by itself, and has its fault then
                calls.append(found)
                if tags.single:
                    break
            if not calls:
                raise Fault("a block has no call that can be read")
            closing = end.match(answer, position)
            return calls, closing.end() if closing else position

        thinking, answer = split_thinking(text, tags.marks, begin)
        return read_blocks(answer, begin, block, thinking, tags.help_text)

    return read


def read_one(
    text: str,
    name: re.Match[str],
    marks: tuple[re.Pattern[str], re.Pattern[str]],
    tags: Tags,
    value: Value,
    tools: Sequence[ToolSpec],
) -> tuple[ToolCall, int]:
    """(the call whose opening tag is `name`, the position after its closing tag)."""
    inner, ahead = marks
    called = next(part for part in name.groups() if part is not None).strip().strip("\"'")
    properties = properties_of(tools, called)
    arguments: dict[str, Any] = {}
    key, attributes, start = "", "", -1
    position = name.end()
    if name[0].endswith("/>"):
        return make_call(called, {}), position

    def keep(stop: int) -> None:
        if start >= 0:
            if key in arguments:
                raise Fault("an argument is given twice")
            raw = trimmed(text[start:stop]) if tags.trim else text[start:stop]
            schema = properties.get(key)
            undeclared = tags.inferred and not types_of(schema)
            arguments[key] = inferred(raw) if undeclared else value(attributes, raw, schema)

    while (mark := inner.search(text, position)) is not None:
        if mark["argument"] is not None:
            keep(mark.start())
            parts = [part for part in mark.groups()[1:] if part is not None]
            key, attributes, start = parts[0].strip(), mark["argument"], mark.end()
        elif mark["closed"] is not None:
            keep(mark.start())
            start = -1
        elif start >= 0 and (later := ahead.search(text, mark.end())) is not None and later["closed"] is not None:
            mark = later  # the closing mark of the call is text of a value, which ends at its own
            keep(mark.start())
            start = -1
        else:
            keep(mark.start())
            body = guessed(text[name.end() : mark.start()].strip()) if not arguments else None
            if isinstance(body, str) and body:
                raise Fault("a call has text that is no argument")
            arguments = body if isinstance(body, dict) else arguments  # some write all of them as one JSON object
            if mark["end"] is not None and not tags.open_ended:
                raise Fault(f"a call must be closed with {tags.close_call}")
            return finished(called, arguments, properties), mark.start() if mark["end"] is not None else mark.end()
        position = mark.end()
    raise Fault("a call ends within its arguments")


def finished(name: str, arguments: dict[str, Any], properties: Mapping[str, Any]) -> ToolCall:
    """The call; arguments that a model has put into one object of another name are taken out of it."""
    for wrapper in ("arguments", "input"):
        if list(arguments) != [wrapper] or wrapper in properties:
            continue
        inside = guessed(arguments[wrapper]) if isinstance(arguments[wrapper], str) else arguments[wrapper]
        if isinstance(inside, dict) and inside.keys() <= properties.keys():
            arguments = inside
    check_value(arguments)
    return make_call(name, arguments)


def trimmed(text: str) -> str:
    """A value without the line break that the template writes before and after it."""
    return text.removeprefix("\n").removesuffix("\n")


def qwen_tags(prefix: str = "", *, trim: bool = True) -> Tags:
    return Tags(
        rf"<{prefix}tool_call>\s*(?=<function=)|(?=<function=)|<{prefix}tool_call>",
        rf"</{prefix}tool_call>|(?=<{prefix}tool_call>)",
        r"<function=([^<>\n]{1,200}?)\s*>",
        "</function>",
        r"<parameter=([^<>\n]{1,200}?)\s*>",
        "</parameter>",
        trim=trim,
        open_ended=True,
        help_text=(
            f"write <{prefix}tool_call><function=NAME><parameter=KEY>value</parameter></function></{prefix}tool_call>"
        ),
        marks=(f"<{prefix}think>", f"</{prefix}think>"),
    )


GLM_TAGS = Tags(
    "<tool_call>",
    "(?!)",
    r"([^<>\n{]{1,200}?)\s{0,16}(?:\\n)?\s{0,16}(?=<arg_key>|</tool_call>)",
    "</tool_call>",
    r"<arg_key>\s{0,16}((?:(?!</?arg_)[^\n]){1,200}?)\s{0,16}</arg_key>(?:\\n|\s){0,16}(?:<arg_value>|(?=[^<\s]))",
    "</arg_value>",
    single=True,
    inferred=True,
    json=True,
    help_text="write <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>",
)
MINIMAX_TAGS = Tags(
    r"<minimax:tool_call>|(?=<invoke name=)",
    "</minimax:tool_call>",
    rf"<invoke\s+name{ATTRIBUTE}\s*>",
    "</invoke>",
    rf"<parameter\s+name{ATTRIBUTE}\s*>",
    "</parameter>",
    help_text='write <minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke>'
    "</minimax:tool_call>",
)
DSML_TAGS = Tags(
    r"<｜DSML｜(?:function|tool)_calls>|(?=<｜DSML｜invoke)",
    "</｜DSML｜(?:function|tool)_calls>",
    rf"<｜DSML｜invoke\s+name{ATTRIBUTE}\s*/?>",
    "</｜DSML｜invoke>",
    rf"<｜DSML｜parameter\s+name{ATTRIBUTE}[^<>]{{0,40}}>",
    "</｜DSML｜parameter>",
    help_text='write <｜DSML｜function_calls><｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">'
    "value</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
)


def format_of(tags: Tags, value: Value = typed) -> Format:
    return Format(reader_of_tags(tags, value), thinking=tags.marks, help_text=tags.help_text)


QWEN_XML = format_of(qwen_tags())
SEED_OSS = format_of(qwen_tags("seed:", trim=False))
GLM = format_of(GLM_TAGS)
MINIMAX = format_of(MINIMAX_TAGS)
DSML = format_of(DSML_TAGS, told)
