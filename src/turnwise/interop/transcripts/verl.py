"""verl's Parquet files: the `messages` of its supervised training, or a `prompt` with a response.

The rows of its reinforcement learning (`prompt`, `reward_model`, `data_source`, `extra_info`) are tasks, not
transcripts: name them as `env.data` of the environment verl. They are transcripts where a row has `response`, or
`responses` of its generation.
"""

from __future__ import annotations

from typing import Any

from turnwise.interop.transcripts.cell import Cell
from turnwise.interop.transcripts.chat import read_chat, read_tools, reward_of, transcript_of, write_chat, write_tools
from turnwise.interop.transcripts.transcript import Transcript
from turnwise.interop.transcripts.trl import read_completion

LOSES = ("marks", "faults", "weights")
FIELDS = (
    "messages",
    "prompt",
    "response",
    "responses",
    "tools",
    "data_source",
    "reward_model",
    "extra_info",
    "ability",
)


def looks(row: Cell) -> bool:
    return row.has("data_source") or row.has("reward_model") or row.has("prompt", "response")


def read(row: Cell) -> list[Transcript]:
    row.only(*FIELDS)
    extra = row.at("extra_info")
    name, reward = (extra.at("name"), extra.at("reward")) if extra is not None else (None, None)
    known: dict[str, Any] = {"tools": read_tools(row.at("tools")), "reward": reward_of(reward)}
    known["name"] = name.text() if name is not None else ""
    if (messages := row.at("messages")) is not None:
        return [transcript_of(read_chat(messages.parsed().items()), row, **known)]
    if (response := row.at("response")) is not None:
        return [read_completion(row, response, **known)]
    if (responses := row.at("responses")) is not None:
        return [read_completion(row, response, **known) for response in responses.items()]
    return row.fail('has no response, so it is a task: name the file as env.data of the environment "verl"')


def write(transcript: Transcript) -> dict[str, Any]:
    extra: dict[str, Any] = {"name": transcript.name}
    if transcript.reward is not None:
        extra["reward"] = transcript.reward
    tools = {"tools": write_tools(transcript.tools)} if transcript.tools else {}
    return {
        "data_source": "turnwise",
        "messages": write_chat(transcript.messages, as_text=False),
        **tools,
        "extra_info": extra,
    }
