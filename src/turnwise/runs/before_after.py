"""Two attempts at one held-out task, before training and after, side by side: what a run has changed, at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from turnwise.messages import Message
from turnwise.runs.archive import read_step
from turnwise.runs.evaluations import evaluation_path
from turnwise.runs.transcript import visible
from turnwise.types import Group, Trajectory

WIDTH = 38
"""Characters of a column: two fit into a terminal of 80."""
LONGEST = 24
"""Lines that are shown of an attempt."""


def before_and_after(folder: Path, last: int, success_at: float) -> list[str]:
    """Lines of a greedy attempt before training and of one after step `last`, of a folder of evaluations; none where it
    has not both. The task is the first that only the later attempt solves, or else the first of all."""
    paths = [evaluation_path(folder, version, "greedy") for version in (0, last)]
    if not last or not all(path.is_file() for path in paths):
        return []
    before, after = ([record.group for record in read_step(path)] for path in paths)
    later = {group.task.id: group for group in after}
    pairs = [(group, later[group.task.id]) for group in before if group.task.id in later]
    chosen = [(old, new) for old, new in pairs if old.trajectories and new.trajectories]
    if not chosen:
        return []
    old, new = next((pair for pair in chosen if is_learned(*pair, success_at)), chosen[0])
    heads = ("before training, greedy", f"after step {last}, greedy")
    columns = [
        [head, "", *shown(group.trajectories[0], success_at)] for head, group in zip(heads, (old, new), strict=True)
    ]
    rows = zip_longest(*columns, fillvalue="")
    return [f"one held-out task, {visible(old.task.id)}", *(f"  {a:{WIDTH}}  {b}".rstrip() for a, b in rows)]


def is_learned(before: Group, after: Group, success_at: float) -> bool:
    """Whether a task was not solved before and is solved after."""
    return before.trajectories[0].total < success_at <= after.trajectories[0].total


def shown(attempt: Trajectory, success_at: float) -> list[str]:
    """An attempt in one column: what the environment said, and behind a mark what the model said."""
    lines = [line for message in attempt.opening if message.role != "system" for line in clipped(message, "  ")]
    for turn in attempt.turns:
        lines.extend(clipped(turn.said, "> "))
        lines.extend(line for message in turn.heard for line in clipped(message, "  "))
    if len(lines) > LONGEST:
        lines = [*lines[: LONGEST - 1], f"  … {len(lines) - LONGEST + 1} lines more"]
    return [*lines, "solved" if attempt.total >= success_at else "not solved"]


def clipped(message: Message, mark: str) -> Iterator[str]:
    """The lines of a message, each as long as a column is wide."""
    said: Sequence[str] = [*message.content.splitlines(), *(f"{call.name} {call.text}" for call in message.calls)]
    for place, line in enumerate(said or [""]):
        text = visible(f"{mark if place == 0 else '  '}{line}")
        yield text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"
