"""The folder of a run: where each of its files is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.runs.atomic import write_atomically


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Example:
        RunFolder(Path("runs/hops-0")).metrics == Path("runs/hops-0/metrics.jsonl")
    """

    path: Path

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any]) -> RunFolder:
        """The folder of a new run, with its config.json; it must be absent or empty."""
        path = Path(path)
        text = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ValueError(
                    f'{path} exists already; resume it with "turnwise train --resume {path}" '
                    "or choose another folder with out=..."
                )
            write_atomically(path / "config.json", text)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(
                f"{path} cannot be a folder because a file is in the way; move it or choose another folder with out=..."
            ) from None
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"cannot write to {path} ({reason}); make it writable or choose another folder with out=..."
            ) from None
        return cls(path)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """The folder of a run that was created before."""
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise ValueError(
                f"{path} is not the folder of a run (it has no config.json); give the folder that "
                '"turnwise train" wrote to'
            )
        return folder

    @property
    def config(self) -> Path:
        """The whole configuration, as resolved at the start."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per line, see `tracker.JsonLines`."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened, in words."""
        return self.path / "events.log"

    @property
    def archive(self) -> Path:
        """Folder of every step's groups, see `archive`."""
        return self.path / "archive"

    @property
    def evaluations(self) -> Path:
        """Folder of the held-out attempts, see `evaluations`."""
        return self.path / "evaluations"

    @property
    def checkpoints(self) -> Path:
        """Folder of what a resume needs, see `checkpoint`."""
        return self.path / "checkpoints"

    @property
    def reference(self) -> Path:
        """The model that training started from, where the recipe holds the policy near it."""
        return self.path / "reference"

    @property
    def summary(self) -> Path:
        """The result, once the run is over."""
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        """The picture of the run, see `curve`."""
        return self.path / "curve.png"
