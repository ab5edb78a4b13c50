"""The folder of a run: where each of its files is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise import disk
from turnwise.atomic import clear_leftovers, write_atomically
from turnwise.runs.checksums import NAME as CHECKSUMS
from turnwise.runs.checksums import check_checksums, check_file, checksum_line
from turnwise.runs.lock import NAME as LOCK

EVENTS, STAMP, ORIGIN = "events.log", "trust", "origin.json"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run.

    Example:
        RunFolder(Path("runs/hops-0")).metrics == Path("runs/hops-0/metrics.jsonl")
    """

    path: Path

    @classmethod
    def make(cls, path: Path | str) -> RunFolder:
        """The folder of a run to come: absent, empty, or with no more in it than a start that failed leaves."""
        path = Path(path)
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            if any(not is_leftover(inside.name) for inside in path.iterdir()):
                raise ValueError(
                    f'{path} exists already; resume it with "turnwise train --resume {path}" '
                    "or choose another folder with out=..."
                )
        return cls(path)

    @classmethod
    def create(
        cls,
        path: Path | str,
        config: Mapping[str, Any],
        stamp_of: Callable[[bytes], str | None] = lambda config: None,
        origin: str = "",
    ) -> RunFolder:
        """The folder of a new run, with its config.json, the checksum of that, the stamp of its owner, if any, and its
        origin, where it is made of another run.

        config.json comes last: it is what makes a folder one of a run, and a kill must not leave one that lacks the
        others.
        """
        folder = cls.make(path)
        text = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
        stamp = stamp_of(text.encode())
        with explained(folder.path):
            clear_leftovers(folder.path)
            try:
                folder.origin.unlink(missing_ok=True)  # a start that was killed may have left one
                if origin:
                    write_atomically(folder.origin, origin)
                if stamp is not None:
                    write_atomically(folder.stamp, stamp + "\n")
                write_atomically(folder.path / CHECKSUMS, checksum_line(text.encode(), folder.config.name))
                write_atomically(folder.config, text)
            except OSError:
                folder.clear()
                raise
        return folder

    def clear(self) -> None:
        """Remove all that a run makes before its first checkpoint, and the folder unless something else is in it. What
        happened, in words, stays."""
        for path in (
            *(self.config, self.path / CHECKSUMS, self.changes, self.stamp),
            *(self.origin, self.metrics, self.machine),
        ):
            path.unlink(missing_ok=True)
        for path in (self.archive, self.evaluations, self.checkpoints, self.reference, self.trackers):
            shutil.rmtree(path, ignore_errors=True)
        clear_leftovers(self.path)
        if {path.name for path in self.path.iterdir()} <= {LOCK}:
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()

    def read_config(self) -> dict[str, Any]:
        """The configuration, once it is known to be what was written."""
        check_file(self.config)
        try:
            tree = json.loads(self.config.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {self.config}: {error}") from None
        if not isinstance(tree, dict):
            raise ValueError(f"{self.config} is no config of a run or a model")
        return tree

    def check_reference(self, needed: bool) -> None:
        """Refuse a run whose start is not what was written, where it kept the model that training started from."""
        if self.reference.is_dir():
            check_checksums(self.reference)
        elif needed:
            raise ValueError(
                f"{self.reference}, the model that training started from, is not there; restore it from a copy"
            )

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
    def changes(self) -> Path:
        """What resumes have changed in it, a line for each, see `resumed`."""
        return self.path / "changes.jsonl"

    @property
    def stamp(self) -> Path:
        """What says whose run it is, see `trust`."""
        return self.path / STAMP

    @property
    def machine(self) -> Path:
        """What the run is computed on and with, see `machine`."""
        return self.path / "machine.json"

    @property
    def origin(self) -> Path:
        """What says which run it was made of, where it was made of one, see `origin`."""
        return self.path / ORIGIN

    @property
    def metrics(self) -> Path:
        """One JSON object per line, see `tracker.JsonLines`."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """What happened, in words."""
        return self.path / EVENTS

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
    def trackers(self) -> Path:
        """Folder of what trackers keep here, and of the ids of the run in each, see `trackers`."""
        return self.path / "trackers"

    @property
    def set_back(self) -> Path:
        """Folder of what was recorded after a checkpoint that the run was set back to, see `setback`."""
        return self.path / "set-back"

    @property
    def summary(self) -> Path:
        """The result, once the run is over."""
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        """The picture of the run, see `curve`."""
        return self.path / "curve.png"

    @property
    def report(self) -> Path:
        """Where `turnwise report` writes unless another place is named."""
        return self.path / "report.html"


def is_leftover(name: str) -> bool:
    """Whether a start that failed or was killed may have left this behind: words, the lock, what
    comes before config.json, what was half written."""
    return name in (EVENTS, LOCK, STAMP, ORIGIN, CHECKSUMS) or (name.startswith(".") and name.endswith(".partial"))


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say what to do where a folder cannot be made or written to; failures of the disk have an answer of their own."""
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"{path} cannot be a folder because a file is in the way; move it or choose another folder with out=..."
        ) from None
    except OSError as error:
        if disk.is_failure(error):
            raise
        reason = error.strerror or error
        raise ValueError(
            f"cannot write to {path} ({reason}); make it writable or choose another folder with out=..."
        ) from None
