"""ShareGPT: `conversations` of `from` and `value`, with the calls and results of LLaMA-Factory's tool data.

A message of gpt that a function_call follows is one message with text and calls. `tools` is a list or a JSON text.
`weight` (or `train`) says whether a message is trained, as in axolotl.
"""

from __future__ import annotations

import json
from typing import Any

from turnwise.interop.transcripts.cell import Cell
from turnwise.interop.transcripts.chat import (
    WEIGHTS,
    Said,
    in_order,
    read_call,
    read_chat,
    read_tools,
    read_weight,
    transcript_of,
    write_tools,
)
from turnwise.interop.transcripts.transcript import Transcript, usually_trained, with_thinking_inside
from turnwise.messages import Message

LOSES = ("name", "reward", "marks", "faults", "thinking")
ROLES = dict.fromkeys(("human", "user"), "user") | dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant")
ROLES |= {"system": "system", "function_call": "assistant"}
ROLES |= dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response"), "tool")
NAMES = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}


def looks(row: Cell) -> bool:
    return row.has("conversations") or row.has("conversation")


def read(row: Cell) -> list[Transcript]:
    row.only("conversations", "conversation", "system", "tools")
    cells = (row.at("conversations") or row.need("conversation")).parsed().items()
    opening = row.at("system")
    before = [Said(Message("system", opening.text()), opening)] if opening is not None and opening.value else []
    is_chat = bool(cells) and cells[0].has("role")
    said = read_chat(cells) if is_chat else in_order(joined([read_turn(cell) for cell in cells]))
    tools = row.at("tools")
    return [transcript_of([*before, *said], row, tools=read_tools(tools if tools and tools.value else None))]


def read_turn(cell: Cell) -> Said:
    cell.only("from", "value", *WEIGHTS)
    speaker, value = cell.need("from").text(), cell.at("value")
    if speaker not in ROLES:
        cell.need("from").fail(f"{speaker[:40]!a} is unknown; there are {', '.join(ROLES)}")
    role = ROLES[speaker]
    weight = read_weight(cell, role)
    if speaker != "function_call":
        return Said(Message(role, value.text() if value is not None else ""), cell, weight=weight)
    listed = cell.need("value").parsed()
    items = listed.items() if isinstance(listed.value, list) else [listed]
    calls = tuple(read_call(item.parsed()) for item in items)
    if not calls:
        listed.fail("has no call")
    return Said(Message("assistant", "", calls=calls), cell, ("",) * len(calls), weight=weight)


def joined(said: list[Said]) -> list[Said]:
    """The same with the text and the calls of one message together."""
    together: list[Said] = []
    for one in said:
        before = together[-1] if together else None
        if one.message.calls and before and before.message.role == "assistant" and not before.message.calls:
            if (before.weight, one.weight) not in ((None, None), (True, True), (False, False)):
                one.cell.fail("is one message with the text before it, and only one of them has a weight")
            message = Message("assistant", before.message.content, calls=one.message.calls)
            together[-1] = Said(message, one.cell, one.ids, weight=one.weight)
        else:
            together.append(one)
    return together


def write(transcript: Transcript) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    text_alone = False
    for index, message in enumerate(map(with_thinking_inside, transcript.messages)):
        trained = transcript.trained[index]
        usual = trained == usually_trained(message, index)
        weight = {} if usual else {"weight": int(trained)}
        if message.calls and text_alone:
            raise ValueError("two messages of the assistant follow each other, the second with calls")
        if message.content or not message.calls:
            turns.append({"from": NAMES[message.role], "value": message.content, **weight})
        if message.calls:
            calls = [{"name": call.name, "arguments": json.loads(call.text)} for call in message.calls]
            value = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
            turns.append({"from": "function_call", "value": value, **weight})
        text_alone = message.role == "assistant" and not message.calls
    tools = {"tools": json.dumps(write_tools(transcript.tools), ensure_ascii=False)} if transcript.tools else {}
    return {"conversations": turns, **tools}
