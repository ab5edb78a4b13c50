"""An attempt as a conversation: messages, tool calls, rewards and times of each turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from turnwise.inspect.attempts import AttemptKey
from turnwise.inspect.recorded_attempt import RecordedAttempt
from turnwise.messages import Message
from turnwise.tokens import lost_tokens
from turnwise.types import Turn
from turnwise.view.channels import channels_of
from turnwise.view.clipped import clipped, number
from turnwise.view.table import whole_number
from turnwise.view.watched_run import WatchedRun

OPENING_TOKENS = 4000
"""Tokens of the first prompt that are shown as text."""
REST_LIMIT = 200_000
"""Characters of a long text that are sent at once."""
PART = re.compile(
    r"failure|task|turns\.(?P<turn>\d{1,9})\.(?:said|heard\.(?P<heard>\d{1,9}))"
    r"\.(?P<field>content|thinking|fault|calls\.(?P<call>\d{1,9}))"
)
"""The names of the texts of an attempt."""


def attempt_page(run: WatchedRun, key: AttemptKey) -> dict[str, Any]:
    """All that the page shows of an attempt but its tokens."""
    attempt = run.reader.attempt(key)
    trajectory, known = attempt.trajectory, attempt.new_from
    turns = trajectory.turns
    opening = turns[0].prompt if turns else np.zeros(0, np.int32)
    return {
        "key": str(key),
        "run": run.name,
        "task": {"id": attempt.task.id, "dataset": attempt.task.dataset, "data": clipped(task_text(attempt), "task")},
        "status": str(trajectory.status),
        "failure": clipped(trajectory.failure, "failure"),
        "reward": number(trajectory.total),
        "outcome": number(trajectory.outcome),
        "marks": {name: number(value) for name, value in trajectory.marks.items()},
        "trained": attempt.trained,
        "channels": channels_of(attempt),
        "opening": {
            "text": run.reader.text_of.text(opening[:OPENING_TOKENS]),
            "tokens": len(opening),
            "shown": min(len(opening), OPENING_TOKENS),
        },
        "turns": [turn_page(attempt, place, known[place]) for place in range(len(turns))],
        "group": siblings(run, key),
    }


def turn_page(attempt: RecordedAttempt, place: int, known: int) -> dict[str, Any]:
    turns = attempt.trajectory.turns
    turn = turns[place]
    credit = attempt.credit[place] if place < len(attempt.credit) else np.zeros(0, np.float32)
    logprobs = turn.logprobs[np.isfinite(turn.logprobs)]
    return {
        "turn": place,
        "prompt_tokens": len(turn.prompt),
        "known_tokens": known,
        "action_tokens": len(turn.action),
        "reward": number(turn.reward),
        "stop": str(turn.stop),
        "broke": str(turn.broke),
        "lost_tokens": lost_tokens(turn, turns[place - 1]) if place and not known else 0,
        "credit": number(float(credit.mean())) if len(credit) else None,
        "logprob": number(float(logprobs.mean())) if len(logprobs) else None,
        "versions": [int(turn.versions.min()), int(turn.versions.max())] if len(turn.versions) else [],
        "timing": {name: number(seconds) for name, seconds in asdict(turn.timing).items()},
        "said": message_page(turn.said, f"turns.{place}.said"),
        "heard": [message_page(message, f"turns.{place}.heard.{nth}") for nth, message in enumerate(turn.heard)],
    }


def message_page(message: Message, part: str) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": clipped(message.content, f"{part}.content"),
        "thinking": clipped(message.thinking, f"{part}.thinking"),
        "fault": clipped(message.fault, f"{part}.fault"),
        "calls": [
            {"name": call.name[:200], "arguments": clipped(call.text, f"{part}.calls.{nth}")}
            for nth, call in enumerate(message.calls)
        ],
    }


def siblings(run: WatchedRun, key: AttemptKey) -> list[dict[str, Any]]:
    """The attempts of the same group, in order."""
    record = run.reader.group(key.kind, key.step, key.group)
    return [
        {
            "attempt": number_,
            "key": str(AttemptKey(key.kind, key.step, key.group, number_)),
            "reward": number(trajectory.total),
            "status": str(trajectory.status),
            "turns": len(trajectory.turns),
            "action_tokens": trajectory.num_action_tokens,
        }
        for number_, trajectory in enumerate((*record.group.trajectories, *record.group.failed))
    ]


def task_text(attempt: RecordedAttempt) -> str:
    return json.dumps(dict(attempt.task.data), ensure_ascii=False, indent=1)


# ---------------------------------------------------------------- long texts


def text_page(run: WatchedRun, key: AttemptKey, parameters: Mapping[str, str]) -> dict[str, Any]:
    """More of a text that was cut: from `from` on."""
    text = text_named(run.reader.attempt(key), parameters.get("part", ""))
    start = max(0, whole_number("from", parameters.get("from") or "0"))
    end = min(len(text), start + REST_LIMIT)
    return {"text": text[start:end], "from": start, "end": end, "length": len(text)}


def text_named(attempt: RecordedAttempt, part: str) -> str:
    found = PART.fullmatch(part)
    if not found:
        raise ValueError(f"an attempt has no text {part[:60]!r}")
    if part == "failure":
        return attempt.trajectory.failure
    if part == "task":
        return task_text(attempt)
    try:
        message = message_at(attempt.trajectory.turns[int(found["turn"])], found["heard"])
        if found["call"] is not None:
            return message.calls[int(found["call"])].text
    except IndexError:
        raise ValueError(f"this attempt has no text {part!r}") from None
    return str(getattr(message, found["field"]))


def message_at(turn: Turn, heard: str | None) -> Message:
    return turn.said if heard is None else turn.heard[int(heard)]
