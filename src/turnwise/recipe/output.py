"""What a run leaves behind: checkpoints, archived trajectories, metrics elsewhere."""

from __future__ import annotations

from pydantic import Field

from turnwise.recipe.section import Section


class CheckpointsConfig(Section):
    """When checkpoints are written, and how many stay."""

    every: int = Field(20, ge=1)
    """Steps between checkpoints; one more is written at the end and on Ctrl-C."""
    keep: int = Field(2, ge=1)
    """How many of the newest checkpoints stay, besides the best one."""


class ArchiveConfig(Section):
    """What is recorded of trajectories, and how long. Open it when the disk is small, when every step of a long run has
    to stay, or to inspect single tokens."""

    in_short_list = ()

    steps: int = Field(1000, ge=1)
    """How many of the newest steps keep their trajectories."""
    evaluations: int = Field(20, ge=1)
    """How many of the newest evaluations keep their trajectories, besides the best one."""
    scores: bool = False
    """Record the learner's logprob and the entropy of every trained token, for the token inspector; costs one forward
    pass per step."""


class ScreenConfig(Section):
    """What training prints besides its progress. Open it to see more or fewer attempts."""

    in_short_list = ()

    attempts_every: int = Field(25, ge=0)
    """Steps between attempts on the screen, the best and the worst of a step; 0 shows none."""


class TrackingConfig(Section):
    """Settings of trackers. Open it when you set `trackers`."""

    in_short_list = ()

    project: str = "turnwise"
    """Project of wandb and trackio, experiment of mlflow."""
