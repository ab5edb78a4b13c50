"""Rollouts of verifiers: the rows of `results.jsonl` (prompt, completion, reward), and the traces of its version 1.

A trace is a graph of messages. Each path from a root to a leaf is a transcript, in which the sampled messages are
trained.
"""

from __future__ import annotations

from typing import Any

from turnwise.interop.transcripts.cell import Cell
from turnwise.interop.transcripts.chat import (
    Said,
    in_order,
    marks_of,
    read_message,
    read_tools,
    reward_of,
    transcript_of,
    write_chat,
    write_tools,
)
from turnwise.interop.transcripts.transcript import Transcript
from turnwise.interop.transcripts.trl import read_completion

LOSES = ("faults", "weights")
FIELDS = ("example_id", "prompt", "completion", "reward", "metrics", "info", "tool_defs", "oai_tools")


def looks(row: Cell) -> bool:
    return row.has("nodes", "task") or (row.has("prompt", "completion", "reward") or row.has("example_id", "prompt"))


def read(row: Cell) -> list[Transcript]:
    if row.has("nodes"):
        return read_trace(row)
    row.only(*FIELDS)
    info = row.at("info")
    inside = info.parsed().at("oai_tools") if info is not None and info.value else None
    known: dict[str, Any] = {
        "tools": read_tools(row.at("tool_defs") or row.at("oai_tools") or inside),
        "reward": reward_of(row.at("reward")),
        "marks": marks_of(row.at("metrics")),
        "name": name_of(row.at("example_id")),
    }
    return [read_completion(row, row.need("completion"), **known)]


def name_of(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return str(cell.value) if isinstance(cell.value, int) else cell.text()


def read_trace(row: Cell) -> list[Transcript]:
    """A transcript for each leaf of a trace."""
    row.only("nodes", "rewards", "metrics", "tools", "id")
    nodes = row.need("nodes").items()
    parents = [parent_of(node, index) for index, node in enumerate(nodes)]
    leaves = [index for index in range(len(nodes)) if index not in parents]
    known: dict[str, Any] = {
        "tools": read_tools(row.at("tools")),
        "reward": reward_of_trace(row.at("rewards")),
        "marks": marks_of(row.at("metrics")),
        "name": name_of(row.at("id")),
    }
    paths = []
    for leaf in leaves:
        path: list[Said] = []
        place: int | None = leaf
        while place is not None:
            path.insert(0, read_node(nodes[place]))
            place = parents[place]
        paths.append(in_order(path))
    if not paths:
        row.fail("has no message of the assistant to train on")
    return [transcript_of(path, row, **known) for path in paths]


def parent_of(node: Cell, index: int) -> int | None:
    """The place of the message before, which is earlier in the list."""
    parent = node.at("parent")
    if parent is None:
        return None
    if type(parent.value) is not int or not 0 <= parent.value < index:
        parent.fail("needs to be the number of an earlier node")
    return int(parent.value)


def read_node(node: Cell) -> Said:
    said = read_message(node.need("message"))
    sampled = node.at("sampled")
    weight = sampled is not None and sampled.weight() and said.message.role == "assistant"
    return Said(said.message, said.cell, said.ids, said.answers, weight)


def reward_of_trace(cell: Cell | None) -> float | None:
    """The weighted sum of named rewards."""
    if cell is None or not cell.value:
        return None
    total = 0.0
    for name in cell.mapping():
        if (reward := cell.at(name)) is None:
            continue
        if isinstance(reward.value, dict):
            weight = reward.at("weight")
            total += reward.need("value").number() * (1.0 if weight is None else weight.number())
        else:
            total += reward.number()
    return Cell(total, cell.place, cell.notes, cell.path).number()


def write(transcript: Transcript) -> dict[str, Any]:
    entries, first = write_chat(transcript.messages), transcript.first_trained
    if not first:
        raise ValueError("its first message is trained, and a prompt has at least one")
    row: dict[str, Any] = {"example_id": transcript.name, "prompt": entries[:first], "completion": entries[first:]}
    if transcript.reward is not None:
        row["reward"] = transcript.reward
    if transcript.marks:
        row["metrics"] = dict(transcript.marks)
    if transcript.tools:
        row["info"] = {"oai_tools": write_tools(transcript.tools)}
    return row
