"""A run looked at again: its recipe, the models it kept and the groups it recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnwise.config import Recipe
from turnwise.recipes import parse_recipe
from turnwise.runs.archive import Record, archived_steps, read_step
from turnwise.runs.checkpoint import NAME, Checkpoint, latest_checkpoint, read_checkpoint
from turnwise.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Past:
    """A run that has trained: at least one step is in its archive, and one checkpoint is there.

    Example:
        Past.open(Path("runs/quickstart")).kept(50)
    """

    folder: RunFolder
    recipe: Recipe
    checkpoint: Checkpoint
    """The latest."""
    steps: tuple[int, ...]
    """Those in the archive, in order."""

    @classmethod
    def open(cls, path: Path) -> Past:
        folder = RunFolder.open(path)
        recipe = parse_recipe(json.loads(folder.config.read_text()), str(folder.config))
        checkpoint = latest_checkpoint(folder.checkpoints)
        if checkpoint is None:
            raise ValueError(f'{path} has no checkpoint yet; go on with it by "turnwise train --resume {path}"')
        steps = tuple(archived_steps(folder.archive))
        if not steps:
            raise ValueError(f'{path} has no step in its archive; go on with it by "turnwise train --resume {path}"')
        return cls(folder, recipe, checkpoint, steps)

    def step(self, wanted: int | None) -> int:
        """The step that is wanted, or the last one."""
        if wanted is None:
            return self.steps[-1]
        if wanted not in self.steps:
            raise ValueError(
                f"{self.folder.path} has no step {wanted} in its archive; choose --step from "
                f"{self.steps[0]} to {self.steps[-1]}"
            )
        return wanted

    def kept(self, step: int) -> list[Record]:
        """The groups that a step trained on, in order."""
        return [record for record in read_step(self.folder.archive / f"step-{step:06d}.parquet") if record.kept]

    def checkpoints(self) -> Iterator[Checkpoint]:
        """Those that are still there, the latest first."""
        names = (path for path in self.folder.checkpoints.iterdir() if NAME.fullmatch(path.name))
        found = [read_checkpoint(path) for path in names if (path / "state.json").is_file()]
        yield from sorted((c for c in found if c.step <= self.checkpoint.step), key=lambda c: -c.step)
