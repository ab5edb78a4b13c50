"""The warm start."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.optimizer import SftOptimizerConfig
from turnwise.recipe.section import Section


class SftConfig(Section):
    """Warm start: supervised training on demonstrations, before reinforcement learning. Open it to make a warm start
    again that the cache has already."""

    in_short_list = ("updates", "demonstrations", "data", "noise", "batch")

    updates: int = Field(0, ge=0)
    """Updates of the warm start; 0 makes none."""
    demonstrations: int = Field(2048, ge=1)
    """Tasks per environment that are demonstrated; a task that comes again has its mistakes at other turns."""
    data: str = ""
    """What to learn from: transcripts as JSON lines, JSON, Parquet or a data set (see transcripts.md), or the .parquet
    file of attempts that `turnwise sft --from RUN` leaves in its folder; empty asks the environments to demonstrate."""
    format: Literal["auto", "openai", "trl", "sharegpt", "verl", "verifiers", "art", "atif", "turnwise"] = "auto"
    """Format of the transcripts in data; auto looks at each row."""
    noise: float = Field(0.0, ge=0, le=1)
    """Chance of a mistake at each demonstrated turn."""
    batch: int = Field(64, ge=1)
    """Demonstrations per update."""
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    """Optimizer of the warm start."""
    remake: bool = False
    """Whether the warm start is made again where the cache has one."""

    @model_validator(mode="after")
    def noise_needs_demonstrators(self) -> Self:
        if self.data and {"noise", "demonstrations"} & set(self.changed):
            raise ValueError("noise and demonstrations apply to demonstrating environments, not to sft.data")
        if self.format != "auto" and not self.data:
            raise ValueError("format is ignored without data, which it is about")
        if self.remake and not self.updates:
            raise ValueError("remake is ignored with updates = 0, which makes no warm start")
        return self
