"""trackio, by default in its folder on this machine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.runs.trackers.attempts import COLUMNS, SampledAttempt, cells
from turnwise.runs.trackers.library import TrackedRun


class Trackio:
    """A run of trackio: metrics by step, the recipe as its config, tables of attempts and the curve as an image.

    trackio finds the run to resume by its name, which therefore ends in random letters. It keeps every value that it
    ever got, so a resume does not send steps again that it has.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run = trackio.init(
            project=run.project,
            name=run.id or f"{run.name}-{secrets.token_hex(4)}",
            config=dict(run.recipe),
            resume="must" if run.id else "never",
            embed=False,
        )
        self.id = str(self._run.name)
        self.where = f"trackio show --project {run.project}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def log_attempts(self, step: int, rows: Sequence[SampledAttempt]) -> None:
        self._run.log({"attempts": self._trackio.Table(columns=list(COLUMNS), data=cells(rows))}, step=step)

    def log_curve(self, step: int, path: Path) -> None:
        self._run.log({"curve": self._trackio.Image(str(path))}, step=step)

    def close(self) -> None:
        self._run.finish()
