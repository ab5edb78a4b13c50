"""Keys and values of runs of tokens: how wide they are in every layer, and where a layer finds its own.

Letters: L layers, G key-value heads, n tokens, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes: that of PyTorch's own allocations on a CPU."""

States = tuple[Tensor, ...]
"""Keys and values of a run of tokens in all layers: [L, 2, G, n, d] for the layers of each shape."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of keys and values that a model's layers have.

    Example:
        Shapes(((4, 32), (1, 64)), {0: (0, 0), 1: (0, 1), 2: (1, 0)}, torch.float32, "cpu")
    """

    kinds: tuple[tuple[int, int], ...]
    """(key-value heads, head size) of each kind of layer; most models have one."""
    place: dict[int, tuple[int, int]]
    """layer -> (kind, which of that kind)"""
    dtype: torch.dtype
    device: str

    @property
    def num_layers(self) -> list[int]:
        """Layers of each kind."""
        return [sum(own == kind for own, _ in self.place.values()) for kind in range(len(self.kinds))]

    @property
    def token_bytes(self) -> int:
        """What one token's keys and values take."""
        sizes = zip(self.num_layers, self.kinds, strict=True)
        return sum(2 * layers * heads * size for layers, (heads, size) in sizes) * self.dtype.itemsize

    def empty(self, num_tokens: int) -> States:
        """Room for a run of tokens."""
        return tuple(
            torch.empty((layers, 2, heads, num_tokens, size), dtype=self.dtype, device=self.device)
            for layers, (heads, size) in zip(self.num_layers, self.kinds, strict=True)
        )

    def zero_rows(self, num_rows: int, num_tokens: int) -> States:
        """Room for rows of tokens, [L, 2, rows, G, n, d] for the layers of each shape."""
        return tuple(
            zeros((layers, 2, num_rows, heads, num_tokens, size), self.dtype, self.device)
            for layers, (heads, size) in zip(self.num_layers, self.kinds, strict=True)
        )


class Watch:
    """The `attend` of a first pass: sees what every layer hands over, and answers nothing of meaning."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int]] = {}
        self.repeated = False

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        self.repeated |= layer in self.seen
        self.seen[layer] = (key.shape[1], key.shape[3])
        return torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format)


def shapes_of(model: Any, dtype: torch.dtype, device: str) -> Shapes:
    """The shapes of a model's keys and values, seen while it computes one token; one that computes its attention
    elsewhere, or a layer twice, is refused."""
    watch, name = Watch(), type(model).__name__
    token = torch.zeros((1, 1), dtype=torch.long, device=device)
    try:
        model.base_model(input_ids=token, position_ids=token, use_cache=False, attend=watch)
    except (TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the slot engine cannot sample from {name}: {reason}") from None
    if watch.repeated:
        raise ValueError(f"the slot engine cannot sample from {name}: it uses a layer more than once")
    kinds = tuple(dict.fromkeys(watch.seen.values()))
    counts = [0] * len(kinds)
    place = {}
    for layer, shape in watch.seen.items():
        kind = kinds.index(shape)
        place[layer] = (kind, counts[kind])
        counts[kind] += 1
    return Shapes(kinds, place, dtype, device)


def part(states: States, start: int, end: int) -> States:
    """The states of some of the tokens, in the same memory."""
    return tuple(own[..., start:end, :] for own in states)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros; on a CPU their memory is taken page by page when first written, so that what is not used costs nothing.

    They begin at a multiple of 64 bytes as PyTorch's own do. NumPy's begin at any multiple of 16, at another one each
    time, and kernels may round differently there.
    """
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    spare = np.zeros(size + ALIGNMENT, np.uint8)
    start = -spare.ctypes.data % ALIGNMENT
    return torch.from_numpy(spare[start : start + size]).view(dtype).view(shape)


def copy_into(target: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for own, other in zip(target, source, strict=True):
        own.copy_(other)
