"""All that a checkpoint keeps of a learner, in host memory: it is written while the learner goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from turnwise.learn.export import Export
from turnwise.learn.snapshot import Group, write_snapshot


@dataclass(frozen=True, slots=True)
class Staged:
    """What one process writes of a checkpoint: its parts of the snapshots, and its files of the export."""

    snapshots: Mapping[str, Mapping[str, Tensor]]
    """Tensors by name, by the folder that they are written into."""
    export: Export

    def write(self, folder: Path, group: Group = None) -> None:
        """Write into a folder; all ranks call this together. Snapshots come first: there a rank hears of what fails on
        another one, and none waits for it."""
        for name, tensors in self.snapshots.items():
            write_snapshot(folder / name, tensors, group)
        self.export.write(folder)
