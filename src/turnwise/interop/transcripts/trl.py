"""TRL's data sets: `prompt` and `completion`, as conversations or as text, or `messages`.

The assistant's messages in a completion are trained, those in a prompt are not. A prompt and a completion that are
plain text are a question and its answer: turnwise asks models through their chat template, TRL does not.
"""

from __future__ import annotations

from typing import Any

from turnwise.interop.transcripts import openai
from turnwise.interop.transcripts.cell import Cell
from turnwise.interop.transcripts.chat import Said, read_chat, read_tools, transcript_of, write_chat, write_tools
from turnwise.interop.transcripts.transcript import Transcript
from turnwise.messages import Message

LOSES = ("name", "reward", "marks", "faults", "weights")


def looks(row: Cell) -> bool:
    return row.has("prompt", "completion") or row.has("chosen") or row.has("text")


def read(row: Cell) -> list[Transcript]:
    if row.has("chosen") or row.has("rejected"):
        row.fail("chosen and rejected are preferences, and turnwise imitates: keep one of them, as completion")
    if row.has("text"):
        row.fail("text does not say which part of it the model is to learn; write prompt and completion, or messages")
    if row.has("messages"):
        return openai.read(row)
    row.only("prompt", "completion", "tools")
    return [read_completion(row, row.need("completion"), tools=read_tools(row.at("tools")))]


def read_completion(row: Cell, completion: Cell, **known: Any) -> Transcript:
    """The transcript of a prompt and its completion."""
    prompt = row.need("prompt")
    if isinstance(prompt.value, str) and isinstance(completion.value, str):
        question = Said(Message("user", prompt.text()), prompt)
        return transcript_of([question, Said(Message("assistant", completion.text()), completion)], row, **known)
    asked = prompt.items()
    if isinstance(completion.value, str):
        return transcript_of(
            [*read_chat(asked), Said(Message("assistant", completion.text()), completion)],
            row,
            start=len(asked),
            **known,
        )
    return transcript_of(read_chat([*asked, *completion.items()]), row, start=len(asked), **known)


def write(transcript: Transcript) -> dict[str, Any]:
    entries, first = write_chat(transcript.messages, as_text=False), transcript.first_trained
    tools = {"tools": write_tools(transcript.tools)} if transcript.tools else {}
    if not first:
        raise ValueError("its first message is trained, and a prompt has at least one")
    return {"prompt": entries[:first], "completion": entries[first:], **tools}
