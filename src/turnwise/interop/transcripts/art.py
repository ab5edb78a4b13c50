"""ART's trajectories: `messages_and_choices`, in which the choices are trained and plain messages are not.

Its logs are read too, as JSON lines and as Parquet: `messages` that say whether they are `trainable`, and groups of
`trajectories`. Each of the `additional_histories` is a transcript with the same reward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turnwise.interop.transcripts.cell import Cell
from turnwise.interop.transcripts.chat import (
    Said,
    in_order,
    marks_of,
    read_chat,
    read_message,
    read_tools,
    reward_of,
    transcript_of,
    write_chat,
    write_tools,
)
from turnwise.interop.transcripts.transcript import Transcript

LOSES = ("faults",)
FIELDS = ("messages_and_choices", "messages", "tools", "reward", "metrics", "metadata", "additional_histories")


def looks(row: Cell) -> bool:
    if row.has("messages_and_choices") or row.has("trajectories"):
        return True
    messages = row.at("messages")
    items = messages.items() if messages is not None and isinstance(messages.value, list) else []
    return bool(items) and items[0].has("trainable")


def read(row: Cell) -> list[Transcript]:
    if row.has("trajectories"):
        row.only("trajectories")
        return [one for cell in row.need("trajectories").items() for one in read_trajectory(cell, row)]
    return read_trajectory(row, row)


def read_trajectory(cell: Cell, row: Cell) -> list[Transcript]:
    cell.only(*FIELDS)
    metadata = cell.at("metadata")
    name = metadata.parsed().at("name") if metadata is not None else None
    known: dict[str, Any] = {
        "reward": reward_of(cell.at("reward")),
        "marks": marks_of(cell.at("metrics")),
        "name": name.text() if name is not None and isinstance(name.value, str) else "",
    }
    more = cell.at("additional_histories")
    histories = [cell, *(more.items() if more is not None else ())]
    return [transcript_of(read_history(one), row, tools=read_tools(one.at("tools")), **known) for one in histories]


def read_history(cell: Cell) -> list[Said]:
    if (messages := cell.at("messages")) is not None:
        return read_chat(messages.items())
    return in_order([read_entry(entry) for entry in cell.need("messages_and_choices").items()])


def read_entry(cell: Cell) -> Said:
    """A choice, which is trained, or a message."""
    if not cell.has("message"):
        return replace(said := read_message(cell), weight=said.weight or False)
    cell.only("message", "finish_reason", "index")
    return replace(read_message(cell.need("message")), weight=True)


def write(transcript: Transcript) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for entry, trained in zip(write_chat(transcript.messages), transcript.trained, strict=True):
        reason = "tool_calls" if entry.get("tool_calls") else "stop"
        entries.append({"finish_reason": reason, "index": 0, "message": entry} if trained else entry)
    row: dict[str, Any] = {"messages_and_choices": entries}
    if transcript.tools:
        row["tools"] = write_tools(transcript.tools)
    if transcript.reward is not None:
        row["reward"] = transcript.reward
    return {**row, "metrics": dict(transcript.marks), "metadata": {"name": transcript.name}, "logs": []}
