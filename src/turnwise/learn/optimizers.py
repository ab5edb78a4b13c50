"""Optimizers by name. Each is made of one or more of PyTorch's or torchao's, which share the parameters out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

Named = Mapping[str, torch.nn.Parameter]

IN_A_LAYER = re.compile(r"\.\d+\.")
"""In the name of every weight of a numbered layer: not of embeddings, output layer and value head."""
BLOCK = 256
"""Values that have a scale in common, in the 8-bit moments of torchao."""
SMALLEST = 4096
"""Values from which on torchao keeps moments in 8 bits."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """An optimizer and what surrounds it."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    name: str = "adamw"


def adamw(named: Named, settings: OptimizerSettings) -> list[Optimizer]:
    """AdamW (arXiv 1711.05101), with two moments a weight, in its dtype."""
    return [
        torch.optim.AdamW(
            [{"params": alike} for alike in by_mesh(list(named.values()))],
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
    ]


def adamw_8bit(named: Named, settings: OptimizerSettings) -> list[Optimizer]:
    """AdamW with moments of 8 bits and a scale for each block of 256 (arXiv 2110.02861), by torchao. Weights whose
    rows, on every rank, are not made of whole blocks have those of AdamW."""
    from torchao.optim import AdamW8bit

    small, large = parted(named, lambda name, parameter: has_blocks(parameter))
    how: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
        "block_size": BLOCK,
    }
    return [*(adamw(small, settings) if small else ()), *([AdamW8bit(large.values(), **how)] if large else ())]


def muon(named: Named, settings: OptimizerSettings) -> list[Optimizer]:
    """Muon (arXiv 2502.16982) for the matrices of layers, and AdamW for all else. Its step is scaled to the size of
    AdamW's, so that both have one learning rate and weight decay."""
    other, matrices = parted(named, lambda name, parameter: parameter.ndim == 2 and bool(IN_A_LAYER.search(name)))
    how: dict[str, Any] = {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }
    return [
        *(adamw(other, settings) if other else ()),
        *([torch.optim.Muon(matrices.values(), **how)] if matrices else ()),
    ]


OPTIMIZERS: dict[str, Callable[[Named, OptimizerSettings], list[Optimizer]]] = {
    "adamw": adamw,
    "adamw_8bit": adamw_8bit,
    "muon": muon,
}


def by_mesh(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters that lie on the same ranks, together: those of experts and of layers that are computed in parts lie on
    other meshes than the rest, and no operation takes tensors of two meshes."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def parted(named: Named, belongs: Callable[[str, torch.nn.Parameter], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the parameters that do not belong, those that do)."""
    inside = {name: parameter for name, parameter in named.items() if belongs(name, parameter)}
    return {name: parameter for name, parameter in named.items() if name not in inside}, inside


def has_blocks(parameter: Tensor) -> bool:
    """Whether the rows of a weight are made of whole blocks on every rank, and each rank has enough of them."""
    shape = list(parameter.shape)
    if not shape:
        return False
    if isinstance(parameter, DTensor):
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if isinstance(placement, Shard):
                if shape[placement.dim] % size:
                    return False
                shape[placement.dim] //= size
    return shape[-1] % BLOCK == 0 and math.prod(shape) >= SMALLEST


def set_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
