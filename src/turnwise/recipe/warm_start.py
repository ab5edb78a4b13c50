"""The warm start."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from turnwise.recipe.optimizer import SftOptimizerConfig
from turnwise.recipe.section import Section


class SftConfig(Section):
    """Warm start on demonstrations, before reinforcement learning."""

    updates: int = Field(0, ge=0)
    """Optimizer steps of the warm start; 0 trains from the model as it is."""
    demonstrations: int = Field(2048, ge=1)
    """Tasks per environment that are demonstrated; met again, each has its mistakes elsewhere."""
    data: str = ""
    """What to learn from: JSON lines with {"messages": [...]}, or the .parquet file of attempts that `turnwise sft
    --from RUN` leaves in its folder; empty asks the environments to demonstrate."""
    noise: float = Field(0.0, ge=0, le=1)
    """Chance of a mistake at each demonstrated turn."""
    batch: int = Field(64, ge=1)
    """Demonstrations per update."""
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    """Optimizer of the warm start."""
    remake: bool = False
    """Make the warm start again, where the cache has one already."""

    @model_validator(mode="after")
    def noise_needs_demonstrators(self) -> Self:
        if self.data and {"noise", "demonstrations"} & set(self.changed):
            raise ValueError("noise and demonstrations apply to demonstrating environments, not to sft.data")
        if self.remake and not self.updates:
            raise ValueError("remake is ignored with updates = 0, which makes no warm start")
        return self
