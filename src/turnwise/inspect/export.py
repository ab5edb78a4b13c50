"""Recorded attempts in the formats of other systems."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.atomic import partial, sync_folder
from turnwise.inspect.best import choose_best
from turnwise.interop.transcripts.formats import FORMATS, as_columns, write_row
from turnwise.interop.transcripts.recorded import transcript_of_attempt
from turnwise.runs.archive import Record, write_records
from turnwise.runs.recorded_archive import RecordedArchive
from turnwise.types import Group, Task, Trajectory

OWN = "turnwise"
SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class ChosenAttempts:
    """Which attempts of a run are written: those that count, of all steps, unless it says otherwise."""

    first_step: int | None = None
    last_step: int | None = None
    best: int | None = None
    """So many of the best attempts at each task."""
    min_reward: float | None = None
    kept: bool = False
    """Only attempts of groups that trained."""


@dataclass(slots=True)
class Exported:
    """What was written, and what could not be."""

    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """By reason: how many attempts."""
    examples: dict[str, str] = field(default_factory=dict)
    """By reason: the first such attempt."""

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out[reason] += 1
        self.examples.setdefault(reason, name)

    def describe(self) -> Iterator[str]:
        for reason, count in self.left_out.most_common():
            yield f"left out {count}: {reason} (for instance {self.examples[reason]})"


def check_output(out: Path, format: str) -> None:
    """Refuse a place that is taken, and a kind of file that a format is not written as."""
    kinds = (".parquet",) if format == OWN else SUFFIXES
    if out.suffix not in kinds:
        raise ValueError(f"{out}: {format} is written as {' or '.join(kinds)}; name the file so")
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists already; choose another name")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent}; make it first")


def attempts_of(
    source: RecordedArchive, choice: ChosenAttempts, show: Callable[[int], None]
) -> Iterator[tuple[str, Task, Trajectory]]:
    """(name, task, attempt) of those that are chosen; `show` hears of each step that was read."""
    if choice.best is not None or choice.min_reward is not None:
        best = choose_best(
            source.folder.path,
            choice.best if choice.best is not None else 1 << 30,
            choice.min_reward if choice.min_reward is not None else -float("inf"),
            source=chosen_steps(source, choice),
            kept=choice.kept,
        )
        for task, attempts in best.chosen.items():
            yield from ((f"{task.id}/{number}", task, one) for number, one in enumerate(attempts))
        return
    steps = chosen_steps(source, choice).steps
    for done, step in enumerate(steps, 1):
        for group, record in enumerate(source.read(step)):
            if record.kept or not choice.kept:
                for number, attempt in enumerate(record.group.trajectories):
                    yield f"train/{step}/{group}/{number}", record.group.task, attempt
        show(done)


def chosen_steps(source: RecordedArchive, choice: ChosenAttempts) -> RecordedArchive:
    """The archive with the chosen steps only."""
    first = source.steps[0] if choice.first_step is None else choice.first_step
    last = source.steps[-1] if choice.last_step is None else choice.last_step
    digests = {step: digest for step, digest in source.digests.items() if first <= step <= last}
    if not digests:
        raise ValueError(
            f"{source.folder.path} has no step from {first} to {last} in its archive; it has {source.steps[0]} to "
            f"{source.steps[-1]}"
        )
    return RecordedArchive(source.folder, digests)


def export(
    source: RecordedArchive,
    out: Path,
    format: str,
    choice: ChosenAttempts,
    *,
    tokens: bool = False,
    show: Callable[[int], None] = lambda done: None,
) -> Exported:
    """Write the chosen attempts of a run to a new file, whole or not at all."""
    if format != OWN and format not in FORMATS:
        raise ValueError(f"there is no format {format}; choose one of {', '.join((*FORMATS, OWN))}")
    if tokens and format not in ("atif", OWN):
        raise ValueError(f"{format} has no place for tokens; write atif or {OWN}, or leave --tokens out")
    check_output(out, format)
    exported, aside = Exported(), partial(out)
    chosen = attempts_of(source, choice, show)
    try:
        if format == OWN:
            write_own(aside, source.steps[-1], chosen, exported)
        elif out.suffix == ".jsonl":
            with aside.open("w", encoding="utf-8") as file:
                for row in rows_of(chosen, format, tokens, exported):
                    file.write(json.dumps(row) + "\n")
        elif out.suffix == ".json":
            rows = list(rows_of(chosen, format, tokens, exported))
            aside.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        else:
            write_table(aside, chosen, format, tokens, exported)
        if not exported.written:
            raise ValueError("; ".join(exported.describe()) or "no attempt was chosen")
        place(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return exported


def place(aside: Path, out: Path) -> None:
    """Give a file its name, on disk when this returns, unless somebody took the name meanwhile."""
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    if out.exists():
        raise ValueError(f"{out} exists already; choose another name")
    os.rename(aside, out)
    sync_folder(out.parent)


def rows_of(
    chosen: Iterator[tuple[str, Task, Trajectory]], format: str, tokens: bool, exported: Exported
) -> Iterator[dict[str, Any]]:
    for name, _, attempt in chosen:
        try:
            row = write_row(transcript_of_attempt(attempt, name), format)
        except ValueError as error:
            exported.leave_out(name, str(error))
            continue
        exported.written += 1
        yield with_tokens_of(row, attempt) if tokens else row


def with_tokens_of(row: dict[str, Any], attempt: Trajectory) -> dict[str, Any]:
    """An ATIF trajectory with the exact tokens of each turn, and their logprobs where those are known."""
    opening = sum(message.role == "assistant" for message in attempt.opening)
    steps = [step for step in row["steps"] if step["source"] == "agent"][opening:]
    for step, turn in zip(steps, attempt.turns, strict=False):
        step["metrics"] = {
            "prompt_token_ids": turn.prompt.tolist(),
            "completion_token_ids": turn.action.tolist(),
            "prompt_tokens": len(turn.prompt),
            "completion_tokens": len(turn.action),
        }
        logprobs = turn.logprobs.tolist()
        if all(value == value for value in logprobs):
            step["metrics"]["logprobs"] = logprobs
    return row


def write_table(
    path: Path, chosen: Iterator[tuple[str, Task, Trajectory]], format: str, tokens: bool, exported: Exported
) -> None:
    """Write rows as Parquet, which holds no half of a surrogate pair."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]

    rows = []
    for row in rows_of(chosen, format, tokens, exported):
        try:
            json.dumps(row, ensure_ascii=False).encode()
            rows.append(row)
        except UnicodeEncodeError:
            exported.written -= 1
            exported.leave_out("an attempt", "a text has half of a surrogate pair, which Parquet cannot hold")
    pq.write_table(as_columns(rows), path, compression="zstd")


def write_own(path: Path, step: int, chosen: Iterator[tuple[str, Task, Trajectory]], exported: Exported) -> None:
    """Write attempts as turnwise's own archive, from which `sft.data` imitates the exact tokens."""
    groups: dict[Task, list[Trajectory]] = {}
    for _, task, attempt in chosen:
        groups.setdefault(task, []).append(attempt)
        exported.written += 1
    write_records(path, step, [Record(Group(task, tuple(made)), False) for task, made in groups.items()])
