"""The archive of a run as something to train on or to score again: checked once, then read a step at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from turnwise.runs.archive import Record, archived_steps, read_step, step_path
from turnwise.runs.folder import RunFolder
from turnwise.runs.seal import read_intact


@dataclass(frozen=True, slots=True)
class RecordedArchive:
    """The steps that a run has in its archive. Nothing is ever written to it.

    Example:
        RecordedArchive.open("runs/quickstart").read(12)
    """

    folder: RunFolder
    digests: Mapping[int, str]
    """By step, in order: SHA-256 of its file."""

    @classmethod
    def open(cls, path: Path | str, step: int | None = None) -> RecordedArchive:
        """All steps of a run, or one. Damaged, in one line, where a file is not as it was written."""
        folder = RunFolder.open(path)
        steps = archived_steps(folder.archive)
        if not steps:
            raise ValueError(f"{path} has no step in its archive; give the folder of a run that has trained")
        if step is not None and step not in steps:
            raise ValueError(f"{path} has no step {step} in its archive; choose one from {steps[0]} to {steps[-1]}")
        return cls(
            folder, {one: checked_digest(step_path(folder.archive, one)) for one in steps if step in (None, one)}
        )

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.digests)

    @property
    def missing(self) -> tuple[int, ...]:
        """Steps between the first and the last that are not there."""
        return tuple(step for step in range(self.steps[0], self.steps[-1]) if step not in self.digests)

    def read(self, step: int) -> list[Record]:
        """The groups of a step, as they were recorded."""
        return read_step(step_path(self.folder.archive, step))


def checked_digest(path: Path) -> str:
    """SHA-256 of a file, once it is known to be as it was written."""
    return hashlib.sha256(read_intact(path)).hexdigest()


def names_of_steps(steps: Collection[int]) -> str:
    """Steps as a phrase.

    Example:
        names_of_steps([3, 4, 5]) == "steps 3 to 5"
    """
    return f"step {min(steps)}" if len(steps) == 1 else f"steps {min(steps)} to {max(steps)}"
