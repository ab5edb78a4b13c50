"""Checkpoints: folders from which a run resumes, and the pointer to the latest.

The pointer is written last, so it never names something incomplete. Each has the checksums of its files, written last,
and is read only where they agree. The pointer says which one counts, and no more: a run without it loses nothing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.atomic import atomic_folder, clear_leftovers, remove_folder, replaced, write_atomically
from turnwise.runs.checksums import NAME as CHECKSUMS
from turnwise.runs.checksums import Damaged, check_checksums, write_checksums

POINTER = "latest"
STATE = "state.json"
NAME = re.compile(r"step-(\d{6,})")
RACES = 5
"""How often a reader looks again where the run that it reads goes on."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, the step it was written after, and the state beside the weights.

    Example:
        Checkpoint(path=Path("checkpoints/step-000020"), step=20, state={"version": 20, "tasks_taken": 1280})
    """

    path: Path
    step: int
    state: Mapping[str, Any]


def write_checkpoint(folder: Path, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """The new checkpoint's folder, complete and named by the pointer; `write` puts the weights and optimizer in.

    What a kill left behind is cleared first. A folder of the same step is replaced.
    """
    text = json.dumps(dict(state), indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    final = checkpoint_path(folder, step)
    with atomic_folder(final) as aside:
        write(aside)
        (aside / STATE).write_text(text)
        write_checksums(aside)
    write_atomically(folder / POINTER, final.name + "\n")
    return final


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint the pointer names, proven whole; None when none was ever completed.

    Where that is not to be had, it is the newest whole one before it, else the newest of all, and a warning says so.
    Raises Damaged where there are checkpoints and none of them is whole.
    """
    for _ in range(RACES):
        named = pointed_step(folder)
        found, wrong = _first_whole(folder, _in_order(folder, named))
        if (found and found.step == named) or pointed_step(folder) == named:
            break  # else a run that goes on wrote another one meanwhile
    if found is None:
        if wrong:
            raise Damaged(f"{folder} has no whole checkpoint, put one back from a copy: {'; '.join(wrong)}")
        return None
    if named is None:
        wrong = [f"{folder / POINTER} does not name a checkpoint", *wrong]
    elif named != found.step and not wrong:
        wrong = [f"{folder / POINTER} names {checkpoint_path(folder, named).name}, which is not there"]
    if wrong:
        log.warning("%s; using %s", "; ".join(wrong), found.path.name)
    return found


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`; raises Damaged where it is not what was written."""
    name = NAME.search(path.name)
    if name is None or not path.is_dir():
        raise ValueError(f"{path} is not a checkpoint; give a folder named like step-000020")
    check_checksums(path)
    if not (path / STATE).is_file():
        raise Damaged(f"{path} is damaged: {STATE} is missing")
    return Checkpoint(path, int(name[1]), json.loads((path / STATE).read_text()))


def check_model_folder(path: Path) -> None:
    """Raise Damaged where a model is to be read from a checkpoint that is not whole. Other models prove nothing."""
    if (path / STATE).is_file() and (path / CHECKSUMS).is_file():
        check_checksums(path)


def pointed_step(folder: Path) -> int | None:
    """The step that the pointer names; None where it names nothing, or nothing that could be a checkpoint."""
    try:
        name = NAME.fullmatch((folder / POINTER).read_text(encoding="ascii").strip())
    except (OSError, UnicodeDecodeError):
        return None
    return int(name[1]) if name else None


def written_steps(folder: Path) -> list[int]:
    """Steps of which there is a checkpoint, whole or not, in order."""
    return sorted(_complete(folder))


def prune_checkpoints(folder: Path, keep: int, best: int | None, evaluating: int | None = None) -> None:
    """Remove all checkpoints but the last `keep`, the one of step `best`, the one of step `evaluating`, which may
    turn out the best, and the one the pointer names.

    Steps after the pointer's are neither counted nor removed: they wait to be replaced by a run that was set back.
    """
    if keep < 1:
        raise ValueError(f"at least 1 checkpoint has to stay, got keep={keep}")
    latest = pointed_step(folder)
    if latest is None:
        return
    past = {step: path for step, path in _complete(folder).items() if step <= latest}
    stay = {*sorted(past)[-keep:], latest, best, evaluating}
    for step, path in past.items():
        if step not in stay:
            remove_folder(path)


def _in_order(folder: Path, named: int | None) -> list[int]:
    """Steps in the order in which their checkpoints are to be tried."""
    steps = {*written_steps(folder), *_half_replaced(folder)}
    if named is None:
        return sorted(steps, reverse=True)
    return sorted(steps, key=lambda step: (step != named, step > named, -step))


def _first_whole(folder: Path, steps: Iterable[int]) -> tuple[Checkpoint | None, list[str]]:
    """(the first checkpoint that is whole, what is wrong with those before it)."""
    wrong: list[str] = []
    for step in steps:
        final = checkpoint_path(folder, step)
        there = [path for path in (final, replaced(final)) if path.is_dir()]
        for path in there:
            try:
                return read_checkpoint(path), wrong
            except Damaged as error:
                wrong.append(str(error))
    return None, wrong


def _half_replaced(folder: Path) -> list[int]:
    """Steps of checkpoints that a kill left aside while new ones took their places."""
    return [int(name[1]) for path in folder.glob(".*.replaced") if (name := NAME.search(path.name))]


def _complete(folder: Path) -> dict[int, Path]:
    """Checkpoint folders by step, in order; what is still being written or removed has another name."""
    if not folder.is_dir():
        return {}
    found = {int(name[1]): path for path in folder.iterdir() if (name := NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))
