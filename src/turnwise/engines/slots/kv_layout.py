"""The layout of cached keys and values: their shape in every layer, and where a layer's are.

Letters: L layers, G key-value heads, n tokens, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.pretrained import CausalLM

ALIGNMENT = 64
"""Bytes: that of PyTorch's allocations on a CPU."""

KVStates = tuple[Tensor, ...]
"""Keys and values of a run of tokens in all layers: [L, 2, G, n, d] for the layers of each shape."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shapes of the keys and values of a model's layers.

    Example:
        KVLayout(((4, 32), (1, 64)), {0: (0, 0), 1: (0, 1), 2: (1, 0)}, torch.float32, "cpu")
    """

    kinds: tuple[tuple[int, int], ...]
    """(key-value heads, head size) of each kind of layer; most models have one."""
    layer_index: dict[int, tuple[int, int]]
    """layer -> (kind, index among the layers of that kind)"""
    dtype: torch.dtype
    device: str
    window: float = math.inf
    """Tokens that the layer with the smallest window sees."""

    @property
    def num_layers(self) -> list[int]:
        """Layers of each kind."""
        return [sum(kind == each for each, _ in self.layer_index.values()) for kind in range(len(self.kinds))]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        sizes = zip(self.num_layers, self.kinds, strict=True)
        return sum(2 * layers * heads * size for layers, (heads, size) in sizes) * self.dtype.itemsize

    def empty(self, num_tokens: int) -> KVStates:
        """Memory for a run of tokens."""
        return tuple(
            torch.empty((layers, 2, heads, num_tokens, size), dtype=self.dtype, device=self.device)
            for layers, (heads, size) in zip(self.num_layers, self.kinds, strict=True)
        )

    def zero_rows(self, num_rows: int, num_tokens: int) -> KVStates:
        """Memory for rows of tokens, [L, 2, rows, G, n, d] for the layers of each shape."""
        return tuple(
            zeros((layers, 2, num_rows, heads, num_tokens, size), self.dtype, self.device)
            for layers, (heads, size) in zip(self.num_layers, self.kinds, strict=True)
        )


class ShapeRecorder:
    """The `attend` of a first pass: records the shape of every layer's keys, and returns zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.repeated = False
        self.window = math.inf

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        sinks: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        self.repeated |= layer in self.shapes
        self.window = min(self.window, math.inf if window is None else window)
        self.shapes[layer] = (key.shape[1], key.shape[3])
        return torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format)


def read_kv_layout(model: CausalLM, dtype: torch.dtype, device: str) -> KVLayout:
    """The layout of a model's keys and values, recorded while it computes one token. A model that does not call
    `attend`, or calls it twice for a layer, is refused."""
    recorder, name = ShapeRecorder(), type(model).__name__
    token = torch.zeros((1, 1), dtype=torch.long, device=device)
    try:
        model.base_model(input_ids=token, position_ids=token, use_cache=False, attend=recorder)
    except (TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the slot engine cannot sample from {name}: {reason}") from None
    if recorder.repeated:
        raise ValueError(f"the slot engine cannot sample from {name}: it uses a layer more than once")
    kinds = tuple(dict.fromkeys(recorder.shapes.values()))
    counts = [0] * len(kinds)
    layer_index = {}
    for layer, shape in recorder.shapes.items():
        kind = kinds.index(shape)
        layer_index[layer] = (kind, counts[kind])
        counts[kind] += 1
    return KVLayout(kinds, layer_index, dtype, device, recorder.window)


def token_range(states: KVStates, start: int, end: int) -> KVStates:
    """The states of some of the tokens, in the same memory."""
    return tuple(tensor[..., start:end, :] for tensor in states)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros; on a CPU the kernel gives them memory page by page when first written, so that unused rows cost nothing.

    They begin at a multiple of 64 bytes as PyTorch's allocations do. NumPy's begin at any multiple of 16, at another
    one each time, and kernels may round differently there.
    """
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    spare = np.zeros(size + ALIGNMENT, np.uint8)
    start = -spare.ctypes.data % ALIGNMENT
    return torch.from_numpy(spare[start : start + size]).view(dtype).view(shape)


def copy_into(target: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for to, tensor in zip(target, source, strict=True):
        to.copy_(tensor)
