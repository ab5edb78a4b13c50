"""Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from turnwise.runs.trackers.attempts import COLUMNS, SampledAttempt, cells
from turnwise.runs.trackers.library import CannotOpen, TrackedRun

OPEN_SECONDS, FINISH_SECONDS = 30, 20
OFFLINE = ("offline", "disabled", "dryrun")


class WeightsAndBiases:
    """A run of W&B with history by step, the recipe as its config, tables of attempts and the curve as an image.

    W&B takes steps in ascending order only, so a resume does not send steps again that it has. Offline it does not
    know of the run before: a resume then writes a second folder with the same id, and `wandb sync` joins them.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        found = wandb.setup().settings
        online = found.mode not in OFFLINE
        if online:
            check_login(found.base_url)
        self._wandb: Any = wandb
        run.folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(silent=True, console="off", init_timeout=OPEN_SECONDS, finish_timeout=FINISH_SECONDS)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id or secrets.token_hex(8),
            resume="allow" if online else None,
            dir=str(run.folder),
            config=dict(run.recipe),
            reinit="create_new",
            settings=settings,
        )
        self.id = str(self._run.id)
        self.where = self._run.url if online else f"wandb sync {Path(self._run.dir).parent}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def log_attempts(self, step: int, rows: Sequence[SampledAttempt]) -> None:
        self._run.log({"attempts": self._wandb.Table(columns=list(COLUMNS), data=cells(rows))}, step=step)

    def log_curve(self, step: int, path: Path) -> None:
        self._run.log({"curve": self._wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        self._run.finish()


def check_login(address: str) -> None:
    """Refuse what W&B would ask a person for: it reads the answer from the terminal, where nobody may be."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    host = urlsplit(address).netloc
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc(path.expanduser()).authenticators(host):
                return
        except (OSError, NetrcParseError):
            continue
    raise CannotOpen(
        f"wandb has no API key for {host}; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
    )
