"""The origin of a run folder: the recorded run that it was made of, by the content of that run's archive."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from turnwise.runs.folder import RunFolder
from turnwise.runs.recorded_archive import RecordedArchive

REPLAY, RESCORED = "replay", "rescored"


@dataclass(frozen=True, slots=True)
class Origin:
    """Which run a folder was made of, and how.

    Example:
        Origin("replay", "/work/runs/quickstart", {"1": "9f86d0..."})
    """

    kind: str
    """`replay` of its groups, or its groups `rescored`."""
    run: str
    """Its folder, as an absolute path."""
    digests: Mapping[str, str]
    """By step: SHA-256 of the file in its archive."""

    @classmethod
    def of(cls, kind: str, source: RecordedArchive) -> Origin:
        digests = {str(step): digest for step, digest in source.digests.items()}
        return cls(kind, str(source.folder.path.resolve()), digests)

    @classmethod
    def read(cls, folder: RunFolder) -> Origin:
        """What a folder says of its origin."""
        try:
            found: Mapping[str, Any] = json.loads(folder.origin.read_text(encoding="utf-8"))
            return cls(str(found["kind"]), str(found["run"]), dict(found["digests"]))
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"{folder.origin} cannot be read; restore it from a copy") from None

    @property
    def text(self) -> str:
        """The content of a folder's origin.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def reopen(self) -> RecordedArchive:
        """The archive again. ValueError where it is not there any more, or has other groups now."""
        source = RecordedArchive.open(self.run)
        found = {str(step): digest for step, digest in source.digests.items()}
        if changed := [step for step, digest in self.digests.items() if found.get(step) != digest]:
            raise ValueError(
                f"step {changed[0]} in the archive of {self.run} is not what it was; restore it from a copy"
            )
        return RecordedArchive(source.folder, {int(step): digest for step, digest in self.digests.items()})
