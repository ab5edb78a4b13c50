"""OpenAI's chat format, in which fine-tuning files are written: `messages`, `tools`, and a `weight` per message."""

from __future__ import annotations

from typing import Any

from turnwise.interop.transcripts.cell import Cell
from turnwise.interop.transcripts.chat import read_chat, read_tools, transcript_of, write_chat, write_tools
from turnwise.interop.transcripts.transcript import Transcript

LOSES = ("name", "reward", "marks", "faults")


def looks(row: Cell) -> bool:
    return row.has("messages")


def read(row: Cell) -> list[Transcript]:
    row.only("messages", "tools", "functions", "parallel_tool_calls")
    said = read_chat(row.need("messages").parsed().items())
    return [transcript_of(said, row, tools=read_tools(row.at("tools") or row.at("functions")))]


def write(transcript: Transcript) -> dict[str, Any]:
    entries = write_chat(transcript.messages)
    for entry, trained in zip(entries, transcript.trained, strict=True):
        if entry["role"] == "assistant":
            entry["weight"] = int(trained)
    tools = {"tools": write_tools(transcript.tools)} if transcript.tools else {}
    return {"messages": entries, **tools}
