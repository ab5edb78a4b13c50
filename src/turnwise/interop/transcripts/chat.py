"""Messages in OpenAI's form, which most formats share: read with the results in the order of their calls, and written.

Content is text or a list of text parts, which are joined. A refusal is what the assistant said. Thinking is
`reasoning_content`, `reasoning` or `thinking`. The role "developer" is the system's, "function" a tool's. Arguments are
JSON text or an object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.interop.transcripts.cell import Cell, printable
from turnwise.interop.transcripts.transcript import Transcript, usually_trained
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.types import LARGEST_PAY

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ROLES |= {"tool": "tool", "function": "tool"}
THINKING = ("reasoning_content", "reasoning", "thinking")
WEIGHTS = ("weight", "trainable", "train")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MESSAGE_FIELDS = ("role", "content", "refusal", *THINKING, "tool_calls", "function_call", "tool_call_id", *WEIGHTS)


@dataclass(frozen=True, slots=True)
class Said:
    """One message as it was read, before results are matched with calls."""

    message: Message
    cell: Cell
    ids: tuple[str, ...] = ()
    """Of its calls; empty texts where they have none."""
    answers: str = ""
    """The id of the call that a result answers, where it says so."""
    weight: bool | None = None
    """Whether it is trained, where it says so."""


def read_chat(cells: Sequence[Cell]) -> list[Said]:
    """The messages of a conversation, with results in the order of their calls."""
    return in_order([read_message(cell) for cell in cells])


def read_message(cell: Cell) -> Said:
    cell.only(*MESSAGE_FIELDS, "name")
    given = cell.need("role").text()
    if given not in ROLES:
        cell.need("role").fail(f"{given[:40]!a} is unknown; there are {', '.join(ROLES)}")
    role = ROLES[given]
    content, thinking = read_content(cell)
    found = [field.text() for name in THINKING if (field := cell.at(name)) is not None]
    thinking = next((text for text in [*found, thinking] if text), "")
    calls, ids = read_calls(cell)
    if role != "assistant" and (calls or thinking):
        cell.fail(f"is the {role}'s, and only the assistant thinks and calls")
    if role != "tool" and cell.has("name"):
        cell.notes.ignored["messages[].name"] += 1
    answers = cell.at("tool_call_id")
    return Said(
        Message(role, content, thinking, calls),
        cell,
        ids,
        answers.text() if answers is not None and role == "tool" else "",
        read_weight(cell, role),
    )


def read_content(cell: Cell) -> tuple[str, str]:
    """(text, thinking) in the content of a message and its refusal."""
    content, refusal = cell.at("content"), cell.at("refusal")
    texts, thinking = [], []
    if content is not None and isinstance(content.value, str):
        texts.append(content.text())
    elif content is not None:
        for part in content.items():
            if isinstance(part.value, str):
                texts.append(part.text())
                continue
            kind = part.need("type").text()
            if kind in TEXT_PARTS:
                part.only("type", "annotations", TEXT_PARTS[kind])
                texts.append(part.need(TEXT_PARTS[kind]).text())
            elif kind in ("thinking", "reasoning"):
                part.only("type", "text", "thinking")
                thinking.append((part.at("thinking") or part.need("text")).text())
            else:
                part.fail(f"a part of the type {kind[:40]!a} cannot be read: only text can")
    if refusal is not None:
        texts.append(refusal.text())
    return "".join(texts), "".join(thinking)


def read_weight(cell: Cell, role: str) -> bool | None:
    for name in WEIGHTS:
        if (field := cell.at(name)) is not None:
            if field.weight() and role != "assistant":
                field.fail("only messages of the assistant are trained")
            return field.weight()
    return None


# ---------------------------------------------------------------- calls and results


def read_calls(cell: Cell) -> tuple[tuple[ToolCall, ...], tuple[str, ...]]:
    """The calls of a message, and their ids."""
    calls, ids = [], []
    listed = cell.at("tool_calls")
    for call in listed.parsed().items() if listed is not None else ():
        call = call.parsed()
        kind = call.at("type")
        if kind is not None and kind.text() != "function":
            kind.fail("only calls of functions can be read")
        call.only("id", "type", "function", "name", "arguments", "index")
        id = call.at("id")
        ids.append(id.text() if id is not None else "")
        calls.append(read_call(call.at("function") or call))
    if (legacy := cell.at("function_call")) is not None:
        ids.append("")
        calls.append(read_call(legacy.parsed()))
    if len(set(filter(None, ids))) < len(list(filter(None, ids))):
        cell.fail("two calls have the same id")
    return tuple(calls), tuple(ids)


def read_call(cell: Cell, name: str = "name") -> ToolCall:
    given = cell.at("arguments")
    is_empty = given is None or given.value == ""
    try:
        call = ToolCall(cell.need(name).text(), {} if given is None or is_empty else given.mapping())
    except ValueError as error:
        if given is not None and not str(error).startswith(cell.place):
            given.fail("is not a JSON object")
        raise
    cell.check_text(call.text)
    return call


def in_order(said: Sequence[Said]) -> list[Said]:
    """The same messages with the results of a message's calls in the order of the calls; ValueError where a call has no
    result although the conversation goes on, and where a result has no call."""
    ordered: list[Said] = []
    index = 0
    while index < len(said):
        one = said[index]
        end = index + 1
        while end < len(said) and said[end].message.role == "tool":
            end += 1
        results = said[index + 1 : end]
        ordered.append(one)
        if one.message.calls and (results or end < len(said)):
            ordered += matched(one, results)
        else:
            for result in results:
                if result.answers:
                    result.cell.fail("tool_call_id names no call of the message before")
            ordered += results
        index = end
    return ordered


def matched(asked: Said, results: Sequence[Said]) -> list[Said]:
    """The results of a message's calls, one for each, in their order."""
    open_calls: dict[int, Said | None] = dict.fromkeys(range(len(asked.ids)))
    for result in results:
        by_id = [index for index, id in enumerate(asked.ids) if id and id == result.answers]
        free = [index for index, answer in open_calls.items() if answer is None]
        if result.answers and any(asked.ids) and not by_id:
            result.cell.fail("tool_call_id names no call of the message before")
        if not free or (by_id and by_id[0] not in free):
            result.cell.fail("a call has two results")
        open_calls[by_id[0] if by_id else free[0]] = result
    for index, answer in open_calls.items():
        if answer is None:
            asked.cell.fail(f"call {index + 1} ({printable_name(asked, index)}) has no result")
    return [answer for answer in open_calls.values() if answer is not None]


def printable_name(asked: Said, index: int) -> str:
    return ascii(asked.message.calls[index].name[:60])[1:-1]


def read_tools(cell: Cell | None) -> tuple[ToolSpec, ...]:
    """The tools of a list in OpenAI's form, or of a JSON text with one."""
    tools: dict[str, ToolSpec] = {}
    for item in cell.parsed().items() if cell is not None else ():
        item = item.parsed()
        function = item.at("function") or item
        description, parameters = function.at("description"), function.at("parameters")
        schema = parameters.mapping() if parameters is not None else {}
        try:
            tool = ToolSpec(
                function.need("name").text(),
                description.text() if description is not None else "",
                **({"parameters": schema} if schema else {}),
            )
        except ValueError as error:
            if str(error).startswith(item.place):
                raise
            function.fail(str(error).splitlines()[0][:200])
        function.check_text(tool.text)
        if tool.name in tools:
            function.fail("is the second tool with this name")
        tools[tool.name] = tool
    return tuple(tools.values())


# ---------------------------------------------------------------- transcripts


def transcript_of(said: Sequence[Said], row: Cell, *, start: int = 0, **known: Any) -> Transcript:
    """The transcript of messages that were read; those before `start` are context."""
    trained = []
    for index, one in enumerate(said):
        usual = usually_trained(one.message, index) and index >= start
        trained.append(usual if one.weight is None else one.weight)
        if trained[-1] and not (one.message.content or one.message.thinking or one.message.calls):
            one.cell.fail("has nothing to train: no text and no call; give it weight 0")
    if not any(trained):
        row.fail("has no message of the assistant to train on")
    return Transcript(tuple(one.message for one in said), tuple(trained), place=row.place, **known)


def reward_of(cell: Cell | None) -> float | None:
    return cell.number() if cell is not None else None


def marks_of(cell: Cell | None) -> dict[str, float]:
    """Named numbers; other values among them are noted as not read."""
    marks: dict[str, float] = {}
    found = cell.parsed() if cell is not None else None
    if found is None:
        return marks
    for name, value in found.mapping().items():
        if isinstance(value, (int, float)) and abs(value) <= LARGEST_PAY:
            marks[name] = float(value)
        elif value is not None:
            found.notes.ignored[f"{found.path}.{printable(name)}"] += 1
    return marks


# ---------------------------------------------------------------- writing


def write_chat(messages: Sequence[Message], *, as_text: bool = True) -> list[dict[str, Any]]:
    """Messages in OpenAI's form, with ids for calls; their arguments are JSON text or objects."""
    entries: list[dict[str, Any]] = []
    waiting: list[str] = []
    number = 0
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role == "tool" and waiting:
            entry["tool_call_id"] = waiting.pop(0)
        if message.thinking:
            entry["reasoning_content"] = message.thinking
        if message.calls:
            waiting = [f"call_{number + index}" for index in range(len(message.calls))]
            number += len(message.calls)
            entry["content"] = message.content or None
            entry["tool_calls"] = [
                write_call(call, id, as_text) for call, id in zip(message.calls, waiting, strict=True)
            ]
        entries.append(entry)
    return entries


def write_call(call: ToolCall, id: str, as_text: bool) -> dict[str, Any]:
    arguments: Any = call.text if as_text else json.loads(call.text)
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def write_tools(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    return [tool.schema for tool in tools]
