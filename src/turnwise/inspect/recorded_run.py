"""A recorded run: its recipe, its checkpoints and its recorded groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnwise.pretrained import CausalLM
from turnwise.recipe.parse import parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import Record, archived_steps, read_step, step_path
from turnwise.runs.checkpoint import (
    Checkpoint,
    checkpoint_path,
    latest_checkpoint,
    pointed_step,
    read_checkpoint,
    written_steps,
)
from turnwise.runs.checksums import Damaged
from turnwise.runs.folder import RunFolder


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run that has trained: it has at least one archived step and one checkpoint.

    Example:
        RecordedRun.open(Path("runs/quickstart")).kept(50)
    """

    folder: RunFolder
    recipe: Recipe
    checkpoint: Checkpoint
    """The latest checkpoint."""
    steps: tuple[int, ...]
    """The archived steps, in order."""

    @classmethod
    def open(cls, path: Path) -> RecordedRun:
        folder = RunFolder.open(path)
        recipe = parse_recipe(folder.read_config(), str(folder.config), is_recorded=True)
        checkpoint = latest_checkpoint(folder.checkpoints)
        if checkpoint is None:
            raise ValueError(f'{path} has no checkpoint yet; continue it with "turnwise train --resume {path}"')
        steps = tuple(archived_steps(folder.archive))
        if not steps:
            raise ValueError(f'{path} has no step in its archive; continue it with "turnwise train --resume {path}"')
        folder.check_reference(needed=bool(recipe.lora.rank))
        return cls(folder, recipe, checkpoint, steps)

    def step(self, wanted: int | None) -> int:
        """The wanted step, or the last one."""
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
        return [record for record in read_step(step_path(self.folder.archive, step)) if record.kept]

    def model(self) -> CausalLM:
        """The model of the latest checkpoint. If the run still trains, it may remove this checkpoint meanwhile."""
        from turnwise.learn.policy import load_model

        try:
            return load_model(self.checkpoint.path)
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"cannot read the model in {self.checkpoint.path} ({reason}); try again") from None

    def checkpoints(self, wrong: list[str] | None = None) -> Iterator[Checkpoint]:
        """The undamaged checkpoints, the latest first; errors of damaged ones are added to `wrong`."""
        last = max(self.checkpoint.step, pointed_step(self.folder.checkpoints) or 0)
        for step in reversed(written_steps(self.folder.checkpoints)):
            path = checkpoint_path(self.folder.checkpoints, step)
            if step > last or not path.is_dir():
                continue
            try:
                yield read_checkpoint(path)
            except Damaged as error:
                if wrong is not None and path.is_dir():  # otherwise the run has removed it meanwhile
                    wrong.append(str(error))
