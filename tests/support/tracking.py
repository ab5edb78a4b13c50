"""A short tracked run in two lives, for tests of trackers; needs no model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import JsonLines, Several, cut_back
from turnwise.runs.trackers.attempts import SampledAttempt
from turnwise.runs.trackers.isolated import IsolatedTracker, Patience
from turnwise.runs.trackers.names import LIBRARIES, open_trackers

RECIPE: dict[str, Any] = {"steps": 4, "env": [{"name": "hops", "tasks": {}}], "lora": {"rank": 0}, "note": "größer"}
ROWS = (
    SampledAttempt("hops-1", 0, "finished", 1.0, 2, "[assistant]\nget amber | ![x](http://127.0.0.1/x.png) <b>"),
    SampledAttempt("hops-2", 3, "failed", -0.5, 0, "[failure]\nOSError: größer \U0001f600"),
)
PATIENT = Patience(open=600, call=600, close=600)
"""The machine may be slow."""
AFTER = 2
"""The checkpoint that the second life goes on from."""


def installed(name: str) -> bool:
    return all(importlib.util.find_spec(package) for package in LIBRARIES[name].packages)


def metrics_of(step: int, life: int) -> dict[str, float]:
    return {"reward/mean": step + life / 10, "eval/sampled/pass@4": 0.5}


def opened(folder: RunFolder, names: Sequence[str], after: int = -1, recipe: Any = RECIPE) -> list[IsolatedTracker]:
    return open_trackers(names, recipe, "turnwise-tests", folder, after, PATIENT)


def first_life(folder: RunFolder, names: Sequence[str]) -> None:
    """Steps 0 to 3 and a table; the checkpoint is that of step 2."""
    folder.path.mkdir(parents=True, exist_ok=True)
    tracker = Several([JsonLines(folder.metrics), *opened(folder, names)])
    for step in range(4):
        tracker.log(step, metrics_of(step, 1))
        if step == 1:
            tracker.log_attempts(step, ROWS)
    tracker.close()


def second_life(folder: RunFolder, names: Sequence[str], recipe: Any = RECIPE) -> None:
    """Step 3 again, step 4, a table and the curve."""
    cut_back(folder.metrics, AFTER)
    tracker = Several([JsonLines(folder.metrics), *opened(folder, names, AFTER, recipe)])
    for step in (3, 4):
        tracker.log(step, metrics_of(step, 2))
    tracker.log_attempts(4, ROWS[:1])
    tracker.log_curve(4, picture(folder.path / "curve.png"))
    tracker.close()


def picture(path: Path) -> Path:
    """A picture of 3 x 2 red pixels."""
    from PIL import Image

    Image.new("RGB", (3, 2), (255, 0, 0)).save(path)
    return path


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The folder of a run to track on this machine only."""
    for name in [
        name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_SPACE", "TRACKIO_SERVER"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    return RunFolder(tmp_path / "quickstart")
