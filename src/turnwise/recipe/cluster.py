"""Where the learner and the engines run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Section


class ClusterConfig(Section):
    """Where the learner and the engines run; by default in one process. Open it when one process or one machine is too
    small."""

    in_short_list = ("ranks", "replicas")

    ranks: int = Field(1, ge=1)
    """Processes of the learner, each with a part of the weights and of the plans; the result is that of one."""
    replicas: int = Field(1, ge=1)
    """Engines on a Ray cluster, which `placement` chooses."""
    placement: Literal["local", "colocated", "disaggregated"] = "local"
    """local is this machine, without Ray; on a Ray cluster, colocated lets learner ranks and engine replicas share
    nodes and GPUs, and disaggregated puts no replica on a node with a rank."""
    address: str = ""
    """Address of the Ray cluster, for instance 10.0.0.7:6379; empty takes the cluster that this machine is part of, or
    starts one here."""
    cpus: float = Field(1.0, gt=0)
    """CPUs of each rank and of each replica on the Ray cluster."""
    gpus: float = Field(0.0, ge=0)
    """GPUs of each rank and of each replica on the Ray cluster; colocated ones share them."""
    placement_seconds: float = Field(120.0, gt=0)
    """Seconds that the Ray cluster has to find room for all ranks and replicas."""

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
