"""Where the learner and the engines run."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from turnwise.recipe.section import Section


class ClusterConfig(Section):
    """Where the learner and the engines run; by default in one process. Open it when one process or one machine is too
    small."""

    in_short_list = ("fsdp", "replicas")

    fsdp: int = Field(1, ge=1)
    """Parts that the learner's weights are divided into (FSDP). Each part has a process, which also has a part of the
    plans; the result is that of one process. The learner has replicate * fsdp * cp * tp processes."""
    tp: int = Field(1, ge=1)
    """Processes that compute each layer of the learner together (tensor parallel), for models whose layers are too
    large for one."""
    cp: int = Field(1, ge=1)
    """Processes that share the tokens of every pass (context parallel, Ulysses), for turns whose activations are too
    much for one. Weights are divided among them too, so there are fsdp * cp parts. At most the attention heads / tp."""
    ep: int = Field(1, ge=1)
    """Parts that the experts of a mixture are divided into (expert parallel): tokens are sent to where their experts
    are. A multiple of tp that divides fsdp * cp * tp; 1 leaves experts to the others."""
    replicate: int = Field(1, ge=1)
    """Copies of the learner's weights (HSDP): each is divided into fsdp parts, for instance among the GPUs of one
    machine."""
    gradient_sync: Literal["pass", "update"] = "pass"
    """When the learner's processes add up their gradients: after each pass, or once an update, which moves fewer bytes
    and needs room for the gradient of all weights on each."""
    offload: bool = False
    """Whether the learner's processes keep master weights, gradients and moments in the memory of the host and step the
    optimizer there (FSDP's CPU offload). Weights are copied to the GPU for each pass, and gradients back."""
    replicas: int = Field(1, ge=1)
    """Engines on a Ray cluster, which `placement` chooses."""
    rollout_workers: int = Field(0, ge=0)
    """Processes that make the attempts: each has environments, renderer and tokenizer of its own. Set it when one
    process does not make turns as fast as the engines answer them; 0 makes attempts in the run's own process. On a Ray
    cluster they are actors, each with a CPU."""
    placement: Literal["local", "colocated", "disaggregated", "separate_nodes"] = "local"
    """local is this machine, without Ray. On a Ray cluster with model.device = "cuda", each learner rank has a GPU and
    each replica engine.vllm.tensor_parallel_size of them: colocated, those of the ranks beside it; disaggregated, its
    own, on any node; separate_nodes, its own, on nodes without a rank."""
    address: str = ""
    """Address of the Ray cluster, for instance 10.0.0.7:6379; empty takes the cluster that this machine is part of, or
    starts one here."""
    cpus: float = Field(1.0, gt=0)
    """CPUs of each rank and of each replica on the Ray cluster."""
    placement_seconds: float = Field(120.0, gt=0)
    """Seconds that the Ray cluster has to find room for all ranks and replicas."""
    answer_seconds: float = Field(60.0, ge=5)
    """Seconds that another process of the run may give no sign of life before it counts as lost, as one does that is
    stopped or cut off: an engine or a server is left out and started again, calls are made elsewhere; a learner rank
    ends the run, which a resume continues. Calls may take longer, rollout.limits.call_seconds should."""

    @property
    def ranks(self) -> int:
        """Processes of the learner."""
        return self.replicate * self.fsdp * self.cp * self.tp

    @property
    def on_ray(self) -> bool:
        return self.placement != "local"

    @property
    def is_spread(self) -> bool:
        """Whether the learner is in other processes than the run."""
        return self.ranks > 1 or self.on_ray

    @model_validator(mode="after")
    def nothing_is_ignored(self) -> Self:
        if not self.on_ray and (ignored := [name for name in self.changed if name not in PARTS]):
            raise ValueError(f'{ignored[0]} is ignored with placement = "local"')
        if self.gradient_sync != "pass" and self.replicate * self.fsdp * self.cp == 1:
            raise ValueError("gradient_sync is ignored where no two processes add up gradients; remove it")
        return self

    @model_validator(mode="after")
    def offload_has_ranks(self) -> Self:
        if self.offload and not self.is_spread:
            raise ValueError("offload is ignored where the learner is one process; remove it, or set fsdp = 2 or more")
        return self

    @model_validator(mode="after")
    def experts_have_a_place(self) -> Self:
        each = self.fsdp * self.cp * self.tp
        if self.ep > 1 and (self.ep % self.tp or each % self.ep):
            raise ValueError(
                f"ep = {self.ep} must be 1, or a multiple of tp = {self.tp} that divides fsdp * cp * tp = {each}: "
                "a part of the experts belongs to whole tensor-parallel groups"
            )
        return self


PARTS = ("fsdp", "tp", "cp", "ep", "replicate", "gradient_sync", "offload", "rollout_workers", "answer_seconds")
"""Keys of the processes of the learner and of rollouts, wherever they are."""
