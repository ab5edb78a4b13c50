"""Evaluations on disk: every held-out attempt, by the version of the weights that made it.

Each has two files. One is Parquet, as the archive's, and `archive.read_step` reads it: whole groups with all tokens,
none of them trained on. Beside it are lines of JSON for people and grep, one for every turn, with all ids on each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from turnwise.atomic import clear_leftovers, write_atomically
from turnwise.runs.archive import Record, write_records
from turnwise.tokens import extends
from turnwise.types import Group, Trajectory

NAME = re.compile(r"step-(\d{6,})-([a-z]+)\.(?:parquet|jsonl)")
Decode = Callable[[Sequence[int]], str]


def write_evaluation(
    folder: Path, version: int, kind: str, groups: Sequence[Group], success_at: float, decode: Decode
) -> Path:
    """The Parquet file of an evaluation, whole, with its lines of JSON beside it; `kind` is how it was sampled."""
    folder.mkdir(parents=True, exist_ok=True)
    path = evaluation_path(folder, version, kind)
    lines = (
        {"version": version, "kind": kind, **line} for group in groups for line in lines_of(group, success_at, decode)
    )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomically(path.with_suffix(".jsonl"), text.encode("utf-8", "backslashreplace"))
    write_records(path, version, [Record(group, False) for group in groups])
    return path


def evaluation_path(folder: Path, version: int, kind: str) -> Path:
    return folder / f"step-{version:06d}-{kind}.parquet"


def lines_of(group: Group, success_at: float, decode: Decode) -> Iterator[dict[str, Any]]:
    """What is to be read of each turn, with the ids of its attempt on every line. Attempts and turns count from 0, in
    the order of the Parquet file: those that count come first. An attempt without a turn has one line, without a
    number.

    The texts of an attempt in their order are the conversation as the model saw it: a prompt is shown from where the
    turn before ends, or whole where it does not begin with it.
    """
    for number, trajectory in enumerate((*group.trajectories, *group.failed)):
        attempt = {
            "dataset": group.task.dataset,
            "task": group.task.id,
            "attempt": number,
            "turn": None,
            "status": str(trajectory.status),
            "total": trajectory.total,
            "success": trajectory.status.counts and trajectory.total >= success_at,
            "marks": dict(trajectory.marks),
            "failure": trajectory.failure,
        }
        if not trajectory.turns:
            yield attempt
        for place, turn in enumerate(trajectory.turns):
            yield attempt | {
                "turn": place,
                "prompt": decode(new_prompt(trajectory, place)),
                "action": decode(turn.action.tolist()),
                "heard": [message.content for message in turn.heard],
                "reward": turn.reward,
                "stop": str(turn.stop),
            }


def new_prompt(trajectory: Trajectory, place: int) -> list[int]:
    """The prompt of a turn from where the turn before ends; whole where it does not begin with that."""
    turn = trajectory.turns[place]
    known = 0
    if place and extends(turn, before := trajectory.turns[place - 1]):
        known = len(before.prompt) + len(before.action)
    tokens: list[int] = turn.prompt[known:].tolist()
    return tokens


def evaluated(folder: Path) -> list[tuple[int, str]]:
    """(version, kind) of every evaluation that is there, in order."""
    return sorted({(int(name[1]), name[2]) for _, name in _files(folder)})


def cut_back(folder: Path, version: int, again: int | None = None) -> None:
    """Remove evaluations of versions after `version`, the one that is made `again`, and what a kill left half
    written."""
    clear_leftovers(folder)
    _remove(folder, {found for found, _ in evaluated(folder) if found > version or found == again})


def paths_after(folder: Path, version: int) -> list[Path]:
    """The files of evaluations of versions after `version`."""
    return [path for path, name in _files(folder) if int(name[1]) > version]


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all evaluations but those of the newest `keep` versions and of the `best`."""
    if keep < 1:
        raise ValueError(f"at least 1 evaluation has to stay, got keep={keep}")
    versions = sorted({version for version, _ in evaluated(folder)})
    _remove(folder, set(versions[:-keep]) - {best})


def _files(folder: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if name := NAME.fullmatch(path.name):
            yield path, name


def _remove(folder: Path, versions: Collection[int]) -> None:
    for path, name in list(_files(folder)):
        if int(name[1]) in versions:
            path.unlink()
