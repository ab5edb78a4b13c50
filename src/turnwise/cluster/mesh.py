"""The mesh: how the ranks of a learner divide its weights and its plans among themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from turnwise.learn.softmax import VocabularyShard
from turnwise.learn.ulysses import Alone, Context, Ulysses
from turnwise.recipe.cluster import ClusterConfig

DATA = ("replicate", "fsdp")
"""The dimensions whose ranks have plans of their own."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How many ranks each dimension of the mesh has.

    Ranks are numbered with `replicate` outermost, then `fsdp`, then `tp`, so that a tensor-parallel group, which
    communicates most, has neighbouring numbers. The ranks of a context-parallel group stand between them: they get the
    same plans, and each computes other nodes of them.

    Example:
        MeshShape(fsdp=4, tp=2)     eight ranks, of which ranks 0 and 1 get the same plans
    """

    replicate: int = 1
    """Copies of the weights."""
    fsdp: int = 1
    """Parts that the weights of a copy are divided into; they are gathered layer by layer."""
    tp: int = 1
    """Parts that a layer is computed in."""
    ep: int = 1
    """Parts that the experts of a mixture are divided into: a multiple of tp that divides fsdp * cp * tp."""
    cp: int = 1
    """Parts that the nodes of a plan are divided into."""

    @classmethod
    def of(cls, config: ClusterConfig) -> MeshShape:
        return cls(config.replicate, config.fsdp, config.tp, config.ep, config.cp)

    @property
    def ranks(self) -> int:
        return self.replicate * self.fsdp * self.same_plans

    @property
    def same_plans(self) -> int:
        """Neighbouring ranks that compute the same plans together."""
        return self.cp * self.tp

    @property
    def num_shards(self) -> int:
        """Parts that the weights of a copy are divided into: ranks that compute other nodes have other parts too."""
        return self.fsdp * self.cp

    @property
    def hands(self) -> int:
        """How many ways plans are dealt."""
        return self.ranks // self.same_plans

    def hand_of(self, rank: int) -> int:
        """Which of the hands a rank computes."""
        return rank // self.same_plans


class Mesh:
    """The process groups of a mesh. All ranks must make it together."""

    def __init__(self, shape: MeshShape, device: str) -> None:
        self.shape = shape
        self.device = device
        self.dense = init_device_mesh(
            device, (shape.replicate, shape.num_shards, shape.tp), mesh_dim_names=("replicate", "fsdp", "tp")
        )
        """Of all weights but those of experts that are divided among ranks."""
        self.experts: DeviceMesh | None = None
        """Of such experts: the same ranks in other groups."""
        if shape.ep > 1:
            each = shape.num_shards * shape.tp // shape.ep
            self.experts = init_device_mesh(
                device, (shape.replicate, each, shape.ep), mesh_dim_names=("replicate", "efsdp", "ep")
            )
        self.context: Context = Alone()
        """Who computes the nodes of a pass."""
        if shape.cp > 1:
            hands = init_device_mesh(device, (shape.hands, shape.cp, shape.tp), mesh_dim_names=("hand", "cp", "tp"))
            self.context = Ulysses(hands["cp"].get_group())

    def of_weights(self) -> DeviceMesh:
        """What weights are divided over: in two dimensions where there are several copies."""
        return self.dense[DATA] if self.shape.replicate > 1 else self.dense["fsdp"]

    def of_expert_weights(self) -> DeviceMesh:
        assert self.experts is not None
        return self.experts[("replicate", "efsdp")] if self.shape.replicate > 1 else self.experts["efsdp"]

    def vocabulary_shard(self, output: Tensor) -> VocabularyShard | None:
        """Which rows of the output layer this rank computes with; None for all of them."""
        if self.shape.tp == 1:
            return None
        size, place = len(output), self.dense["tp"].get_local_rank()
        _, first = Shard.local_shard_size_and_offset(size, self.shape.tp, place)
        return VocabularyShard(self.dense["tp"].get_group(), first, size)

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that have, between them, every node of every plan once."""
        data = self.dense[DATA]._flatten("data") if self.shape.replicate > 1 else self.dense["fsdp"]
        return data.get_group()
