"""The table of attempts that trackers show: a few of each step, with their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from turnwise.messages import Message
from turnwise.tokens import Tokens
from turnwise.types import Group, Trajectory

GROUPS = 4
"""Of these many groups the best and the worst attempt are shown."""
LONGEST = 4000
"""Characters of the text of an attempt that are shown."""


@dataclass(frozen=True, slots=True)
class SampledAttempt:
    """One attempt as a row of a table.

    Example:
        SampledAttempt(task="hops-5f2c01", attempt=3, status="finished", reward=1.0, turns=2, text="[prompt]\\n...")
    """

    task: str
    attempt: int
    """Its place in the group: attempts that count come first."""
    status: str
    reward: float
    turns: int
    text: str
    """The first prompt, then what the model said and heard; the middle of a long text is left out."""


COLUMNS = tuple(field.name for field in fields(SampledAttempt))


def rows_of(groups: Sequence[Group], decode: Callable[[Tokens], str]) -> list[SampledAttempt]:
    """The best and the worst attempt of each of the first groups that have any, so that both are seen side by side."""
    rows: list[SampledAttempt] = []
    shown = [group for group in groups if group.trajectories or group.failed][:GROUPS]
    for group in shown:
        attempts = [*group.trajectories, *group.failed]
        ranked = sorted(range(len(attempts)), key=lambda place: attempts[place].total)
        for place in dict.fromkeys([ranked[-1], ranked[0]]):
            attempt = attempts[place]
            text = cut("\n".join(text_of(attempt, decode)))
            rows.append(
                SampledAttempt(group.task.id, place, str(attempt.status), attempt.total, len(attempt.turns), text)
            )
    return rows


def cells(rows: Sequence[SampledAttempt]) -> list[list[Any]]:
    """The rows as lists, in the order of COLUMNS."""
    return [list(astuple(row)) for row in rows]


def cut(text: str, longest: int = LONGEST) -> str:
    """A text that every library can store, without its middle where it is too long: how an attempt began and how it
    ended are both of interest."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= longest:
        return text
    head = longest // 4
    tail = longest - head
    return f"{text[:head]}\n[... {len(text) - longest} characters left out ...]\n{text[-tail:]}"


def text_of(attempt: Trajectory, decode: Callable[[Tokens], str]) -> Iterator[str]:
    """The lines of an attempt."""
    if attempt.turns:
        yield f"[prompt]\n{decode(attempt.turns[0].prompt)}"
    for turn in attempt.turns:
        for message in (turn.said, *turn.heard):
            yield f"[{message.role}]\n{content_of(message)}"
    if attempt.failure:
        yield f"[failure]\n{attempt.failure}"


def content_of(message: Message) -> str:
    calls = [f"{call.name}({call.text})" for call in message.calls]
    return "\n".join(part for part in (message.thinking, message.content, *calls) if part)
