"""What a run leaves behind."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnwise.recipe.section import Section


class RunsConfig(Section):
    """What a run leaves behind."""

    checkpoint_every: int = Field(20, ge=1)
    """Steps between checkpoints; one more is written at the end and on Ctrl-C."""
    checkpoints: int = Field(2, ge=1)
    """How many of the newest checkpoints stay, beside the best one."""
    archive_steps: int = Field(1000, ge=1)
    """How many of the newest steps' trajectories stay in the archive."""
    evaluations: int = Field(20, ge=1)
    """How many of the newest evaluations' trajectories stay, beside those of the best."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Where metrics, tables of attempts and the curve go beside the run folder; see docs/guides/trackers.md."""
    project: str = "turnwise"
    """Project of wandb and trackio, experiment of mlflow."""
