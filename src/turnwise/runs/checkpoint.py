"""Checkpoints: folders from which a run resumes, and the pointer to the latest.

The pointer is written last, so it never names something incomplete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.runs.atomic import atomic_folder, clear_leftovers, remove_folder, replaced, write_atomically

POINTER = "latest"
NAME = re.compile(r"step-(\d{6,})")


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
        (aside / "state.json").write_text(text)
    write_atomically(folder / POINTER, final.name + "\n")
    return final


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint the pointer names; None when none was ever completed."""
    pointer = folder / POINTER
    if not pointer.exists():
        return None
    named = folder / pointer.read_text().strip()
    for path in (named, replaced(named)):
        if (path / "state.json").is_file():
            return read_checkpoint(path)
    others = ", ".join(path.name for path in _complete(folder).values()) or "none"
    raise ValueError(
        f"{pointer} names {named.name}, which is not there; write the name of another checkpoint into it ({others})"
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`."""
    name = NAME.search(path.name)
    if name is None or not (path / "state.json").is_file():
        raise ValueError(f"{path} is not a checkpoint; give a folder named like step-000020 that has a state.json")
    return Checkpoint(path, int(name[1]), json.loads((path / "state.json").read_text()))


def prune_checkpoints(folder: Path, keep: int, best: int | None, examined: int | None = None) -> None:
    """Remove all checkpoints but the last `keep`, the one of step `best`, the one that is being `examined`, which may
    turn out the best, and the one the pointer names.

    Steps after the pointer's are neither counted nor removed: they wait to be replaced by a run that was set back.
    """
    if keep < 1:
        raise ValueError(f"at least 1 checkpoint has to stay, got keep={keep}")
    latest = latest_checkpoint(folder)
    if latest is None:
        return
    past = {step: path for step, path in _complete(folder).items() if step <= latest.step}
    stay = {*sorted(past)[-keep:], latest.step, best, examined}
    for step, path in past.items():
        if step not in stay:
            remove_folder(path)


def _complete(folder: Path) -> dict[int, Path]:
    """Checkpoint folders by step, in order; what is still being written or removed has another name."""
    found = {int(name[1]): path for path in folder.iterdir() if (name := NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))
