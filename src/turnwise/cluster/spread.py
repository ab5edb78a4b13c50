"""Spread models: what a rank has of the models of a learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turnwise.cluster.loading import load_sharded
from turnwise.cluster.mesh import Mesh
from turnwise.cluster.shard import Shell, reduce_sums, shard
from turnwise.learn.critic import value_head
from turnwise.learn.lora import Adapters
from turnwise.learn.model_checks import Reach
from turnwise.learn.model_cut import model_on_meta
from turnwise.learn.softmax import VocabularyShard
from turnwise.learn.stepper import Sums
from turnwise.learn.ulysses import Context
from turnwise.pretrained import CausalLM

PutAdapters = Callable[[CausalLM], Adapters]
"""Puts adapters into a model."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A model where it computes."""

    model: CausalLM
    enter: Callable[..., Any] | None = None
    """Calls what computes a pass; None where the model is whole."""
    head: torch.nn.Linear | None = None
    """Of a critic that is spread over ranks."""
    adapters: Adapters | None = None
    shard: VocabularyShard | None = None
    """Which rows of the output layer are here, where other ranks have the rest."""
    sync: Callable[[bool], None] | None = None
    """Tells a backward pass whether it is the last of an update, where that is when gradients are added up."""
    reach: Sequence[Reach] | None = None
    """What `check_by_config` found of it; None where the model is whole, and is checked as it is."""
    context: Context | None = None
    """Who computes the nodes of a pass; None where this process does."""
    device: str | None = None
    """Where passes compute; None where the weights are there too."""


class Spread:
    """Loads models, spread over the ranks of a mesh. All ranks must call each method together."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def load(
        self,
        path: str | Path,
        *,
        computed_in: torch.dtype,
        dtype: torch.dtype = torch.float32,
        with_head: bool = False,
        put_adapters: PutAdapters | None = None,
        sync_each_pass: bool = True,
        offload: bool = False,
    ) -> Placed:
        """The model of a folder, its weights in `dtype`; with a value head, or with adapters put into it. Gradients are
        added up over ranks in each pass, or in the last one of an update. With `offload` weights and gradients are in
        the memory of the host between passes."""
        shells: list[Shell] = []
        adapters: list[Adapters] = []
        renamed = {} if put_adapters is None else put_adapters(model_on_meta(path)).new_names

        def place(model: CausalLM) -> None:
            if put_adapters is not None:
                adapters.append(put_adapters(model))
            head = value_head(model, "meta", dtype) if with_head else None
            shells.append(Shell(model, head))
            shard(shells[0], self.mesh, computed_in, offload)

        model = load_sharded(path, place, dtype, renamed, offload)
        [shell] = shells
        if shell.head is not None:
            shell.head.to_empty(device="cpu" if offload else self.mesh.device)
        for each in adapters:
            each.begin()
        return Placed(
            model,
            shell,
            shell.head,
            adapters[0] if adapters else None,
            self.mesh.vocabulary_shard(model.get_output_embeddings().weight),
            None if sync_each_pass else shell.sync_gradients,
            context=self.mesh.context,
            device=self.mesh.device if offload else None,
        )

    def reduce(self, sums: Sums) -> Sums:
        return reduce_sums(sums, self.mesh.data_group)
