"""Where the learner and the engines run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Section


class ClusterConfig(Section):
    """Where the learner and the engines run. By itself, all of a run is in one process."""

    placement: Literal["local", "colocated", "disaggregated"] = "local"
    """local is this machine, without Ray. On a Ray cluster colocated has learner ranks and engine replicas share nodes
    and GPUs, and disaggregated has no replica on a node with a rank."""
    address: str = ""
    """Of the Ray cluster, for instance 10.0.0.7:6379; empty takes the one that this machine is part of, or starts one
    here."""
    ranks: int = Field(1, ge=1)
    """Processes that hold the learner together, each with a part of the weights and of the plans; the result is that of
    one."""
    replicas: int = Field(1, ge=1)
    """Engines on the Ray cluster."""
    cpus: float = Field(1.0, gt=0)
    """CPUs that a rank and a replica have on the Ray cluster, each."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that a rank and a replica have there, each; colocated ones share them."""
    placement_seconds: float = Field(120.0, gt=0)
    """Seconds that the Ray cluster has to find room for all of them."""

    @property
    def on_ray(self) -> bool:
        return self.placement != "local"

    @property
    def is_spread(self) -> bool:
        """Whether the learner is in other processes than the run."""
        return self.ranks > 1 or self.on_ray

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.on_ray and (ignored := [name for name in self.changed if name != "ranks"]):
            raise ValueError(f'{ignored[0]} is ignored with placement = "local"')
        return self
