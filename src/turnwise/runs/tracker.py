"""Trackers: where the metrics of each step go. `trackers` has those of other libraries."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from turnwise.atomic import append_durably, write_atomically
from turnwise.runs.checksums import Damaged
from turnwise.runs.trackers.attempts import SampledAttempt

NONFINITE = "nonfinite"


class Tracker(Protocol):
    """Something that takes what a run reports."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_unfinished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take what is known of a step that a run stopped in, and that a resume makes again."""
        ...

    def log_attempts(self, step: int, rows: Sequence[SampledAttempt]) -> None:
        """Take a few attempts of a step as a table."""
        ...

    def log_curve(self, step: int, path: Path) -> None:
        """Take the picture of the run, once at its end."""
        ...

    def close(self) -> None: ...


class JsonLines:
    """The tracker every run has: one JSON object per line, on disk before the next step begins.

    Floats come back bit for bit. JSON has no NaN and no infinity: they are written as null and named in "nonfinite".

    Example:
        {"step": 3, "reward/mean": 0.25, "kl": null, "nonfinite": ["kl"]}
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
            raise ValueError(f"{path} ends in a torn line; cut it back to the step to resume from first")
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert not {"step", NONFINITE} & metrics.keys(), "step and nonfinite are names of the file's own"
        line: dict[str, Any] = {"step": step}
        for name, value in metrics.items():
            line[name] = float(value) if math.isfinite(value) else None
        if nonfinite := [name for name, value in line.items() if value is None]:
            line[NONFINITE] = nonfinite
        append_durably(self._path, (json.dumps(line, allow_nan=False) + "\n").encode())

    def log_unfinished(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log(step, metrics)  # which a resume cuts away

    def log_attempts(self, step: int, rows: Sequence[SampledAttempt]) -> None:
        pass  # the archive has all of them

    def log_curve(self, step: int, path: Path) -> None:
        pass  # it is in the folder of the run

    def close(self) -> None:
        pass


class Several:
    """A tracker that passes everything on to each of `trackers`, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def log_unfinished(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log_unfinished(step, metrics)

    def log_attempts(self, step: int, rows: Sequence[SampledAttempt]) -> None:
        for tracker in self._trackers:
            tracker.log_attempts(step, rows)

    def log_curve(self, step: int, path: Path) -> None:
        for tracker in self._trackers:
            tracker.log_curve(step, path)

    def close(self) -> None:
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """What `JsonLines` wrote, a dict per line with its "step"; empty before the first step.

    Values named in "nonfinite" come back as NaN. A torn last line, from a kill, is left out.
    """
    return [
        {name: math.nan if value is None else value for name, value in line.items() if name != NONFINITE}
        for _, line in _whole_lines(path)
    ]


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after `step` and a torn last line, so that a run resumed from `step` can append."""
    if path.exists():
        kept = b"".join(text + b"\n" for text, line in _whole_lines(path) if line["step"] <= step)
        if kept != path.read_bytes():
            write_atomically(path, kept)


def lines_after(path: Path, step: int) -> bytes:
    """What `cut_back` drops, but for a torn last line."""
    return b"".join(text + b"\n" for text, line in _whole_lines(path) if line["step"] > step)


def seal(path: Path) -> dict[str, Any]:
    """What a checkpoint remembers of a metrics file, so that a resume knows it again."""
    data = path.read_bytes() if path.exists() else b""
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def check_seal(path: Path, sealed: Mapping[str, Any]) -> None:
    """Raise Damaged where a metrics file does not begin as it was when it was sealed. One that is not there, or that
    was never sealed, has nothing to be compared with."""
    if not sealed or not path.exists():
        return
    data = path.read_bytes()[: sealed["bytes"]]
    if len(data) < sealed["bytes"] or hashlib.sha256(data).hexdigest() != sealed["sha256"]:
        raise Damaged(
            f"{path} is damaged: it is not what it was when the checkpoint was written; restore it from a copy, or "
            "move it away to go on without it"
        )


def _whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each whole line of a metrics file, as it is and as read; only the last may be torn."""
    texts = path.read_bytes().removesuffix(b"\n").split(b"\n") if path.exists() else []
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            if number < len(texts):
                raise ValueError(f"line {number} of {path} is not JSON; repair or remove that line") from None
            continue
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            raise ValueError(f"line {number} of {path} has no step; repair or remove that line")
        lines.append((text, line))
    return lines
