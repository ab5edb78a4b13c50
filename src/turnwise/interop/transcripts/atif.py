"""ATIF, the trajectories of Harbor: `steps` of the system, the user and the agent, with calls and observations.

An agent's step is one message. The results of its calls are in its observation; a result that names no call is a
message of the user. Steps that were copied as context (`is_copied_context`), and those without a call of a model
(`llm_call_count` 0), are not trained. ATIF has no place for a reward: it is written as `reward` in `extra`.
"""

from __future__ import annotations

import json
from typing import Any

from turnwise import __version__
from turnwise.interop.transcripts.cell import Cell
from turnwise.interop.transcripts.chat import (
    Said,
    in_order,
    marks_of,
    read_call,
    read_content,
    read_tools,
    reward_of,
    transcript_of,
    write_tools,
)
from turnwise.interop.transcripts.transcript import Transcript
from turnwise.messages import Message

LOSES = ("faults", "results")
VERSION = "ATIF-v1.7"
SOURCES = {"system": "system", "user": "user", "agent": "assistant"}
ROOT = ("schema_version", "session_id", "trajectory_id", "agent", "steps", "extra")
STEP = ("step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "is_copied_context")


def looks(row: Cell) -> bool:
    return row.has("steps", "agent") or row.has("schema_version", "steps")


def read(row: Cell) -> list[Transcript]:
    row.only(*ROOT)
    agent, extra = row.at("agent"), row.at("extra")
    offered = agent.parsed().at("tool_definitions") if agent is not None else None
    said = [one for step in row.need("steps").items() for one in read_step(step)]
    name = row.at("session_id")
    return [
        transcript_of(
            in_order(said),
            row,
            tools=read_tools(offered),
            reward=reward_of(extra.at("reward") if extra is not None else None),
            marks=marks_of(extra.at("marks") if extra is not None else None),
            name=name.text() if name is not None else "",
        )
    ]


def read_step(step: Cell) -> list[Said]:
    """The messages of a step: what was said, and what was observed."""
    step.only(*STEP, "timestamp", "model_name", "llm_call_count", "metrics", "extra", "reasoning_effort")
    source = step.need("source").text()
    if source not in SOURCES:
        step.need("source").fail(f"{source[:40]!a} is unknown; there are {', '.join(SOURCES)}")
    content, _ = read_content(Cell({"content": step.value.get("message")}, step.place, step.notes, step.path))
    thinking, calls, ids = step.at("reasoning_content"), [], []
    listed = step.at("tool_calls")
    for call in listed.items() if listed is not None else ():
        call.only("tool_call_id", "function_name", "arguments", "extra")
        ids.append(call.need("tool_call_id").text())
        calls.append(read_call(call, "function_name"))
    message = Message(SOURCES[source], content, thinking.text() if thinking is not None else "", tuple(calls))
    if source != "agent" and (calls or message.thinking):
        step.fail(f"is the {source}'s, and only the agent thinks and calls")
    weight = (not is_context(step)) if source == "agent" else None
    return [Said(message, step, tuple(ids), weight=weight), *read_results(step)]


def is_context(step: Cell) -> bool:
    copied, called = step.at("is_copied_context"), step.at("llm_call_count")
    return (copied is not None and copied.weight()) or (called is not None and called.number() == 0)


def read_results(step: Cell) -> list[Said]:
    results = []
    observation = step.at("observation")
    for result in observation.need("results").items() if observation is not None else ():
        result.only("source_call_id", "content")
        if not result.has("content"):
            result.fail("has no content; what a subagent did is not read")
        answers = result.at("source_call_id")
        content, _ = read_content(result)
        role = "user" if answers is None else "tool"
        results.append(Said(Message(role, content), result, answers="" if answers is None else answers.text()))
    return results


def write(transcript: Transcript) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    waiting: list[str] = []
    number = 0
    for message, trained in zip(transcript.messages, transcript.trained, strict=True):
        if message.role == "tool" and waiting:
            result = {"source_call_id": waiting.pop(0), "content": message.content}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = {"system": "system", "assistant": "agent"}.get(message.role, "user")
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": message.content}
        if message.thinking:
            step["reasoning_content"] = message.thinking
        if message.calls:
            waiting = [f"call_{number + index}" for index in range(len(message.calls))]
            number += len(message.calls)
            step["tool_calls"] = [
                {"tool_call_id": id, "function_name": call.name, "arguments": json.loads(call.text)}
                for id, call in zip(waiting, message.calls, strict=True)
            ]
        if source == "agent" and not trained:
            step["is_copied_context"] = True
        steps.append(step)
    extra: dict[str, Any] = {"marks": dict(transcript.marks)} if transcript.marks else {}
    if transcript.reward is not None:
        extra["reward"] = transcript.reward
    agent: dict[str, Any] = {"name": "turnwise", "version": __version__}
    if transcript.tools:
        agent["tool_definitions"] = write_tools(transcript.tools)
    row = {"schema_version": VERSION, "session_id": transcript.name, "agent": agent, "steps": steps}
    return {**row, "extra": extra} if extra else row
