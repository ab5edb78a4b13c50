"""The keys and values of every slot, and attention over them.

Letters: S slots, L tokens a slot can hold, N tokens of one forward pass, H heads, G key-value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Slots whose new tokens are computed together: `width` queries each, padded where a row has fewer."""

    slots: Tensor
    """[R]"""
    places: Tensor
    """[R, width] where each query stands among the N tokens of the pass; any place where it is padding."""
    tokens: Tensor
    """[M] the tokens of the pass these rows hold, flat"""
    inside: Tensor
    """[M] the same tokens in the flattened [R, width]"""
    mask: Tensor
    """[R, 1, queries, total] which cached tokens each query may see"""


class SlotCache:
    """Keys and values [S, G, L, d] per layer."""

    def __init__(
        self, slots: int, context: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (slots, kv_heads, context, head_dim)
        self.keys = [zeros(shape, dtype, device) for _ in range(layers)]
        self.values = [zeros(shape, dtype, device) for _ in range(layers)]
        self.device = device
        self.kv_heads = kv_heads

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def attend(self, slots: Index, starts: Index, counts: Index, heads: int) -> CacheAttention:
        """Attention for a pass that computes `counts` new tokens of each slot, from position `starts` on."""
        return CacheAttention(self, slots, starts, counts, heads)


class CacheAttention:
    """The `attend` callable of one forward pass: writes the new keys and values, then attends over the cache."""

    def __init__(self, cache: SlotCache, slots: Index, starts: Index, counts: Index, heads: int) -> None:
        self.cache = cache
        self.total = int((starts + counts).max())
        owner = np.repeat(np.arange(len(slots)), counts)
        first = np.cumsum(counts) - counts
        within = np.arange(len(owner)) - first[owner]
        positions = starts[owner] + within
        self.slot_index = self.tensor(slots[owner])
        self.position_index = self.tensor(positions)
        self.share = heads // cache.kv_heads
        singles = np.flatnonzero(counts == 1)
        longer = np.flatnonzero(counts > 1)
        self.batches = [self.rows(part, slots, starts, counts, first) for part in (singles, longer) if len(part)]

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.require(array, requirements=("C", "W"))).to(self.cache.device)

    def rows(self, part: Index, slots: Index, starts: Index, counts: Index, first: Index) -> Rows:
        width = int(counts[part].max())
        offsets = np.arange(width)
        real = offsets < counts[part, None]
        places = first[part, None] + np.where(real, offsets, 0)
        positions = starts[part, None] + np.where(real, offsets, 0)
        visible = np.arange(self.total) <= positions[:, :, None]
        mask = np.broadcast_to(visible[:, None, None], (len(part), 1, self.share, width, self.total))
        return Rows(
            slots=self.tensor(slots[part]),
            places=self.tensor(places),
            tokens=self.tensor(places[real]),
            inside=self.tensor(np.flatnonzero(real)),
            mask=self.tensor(mask.reshape(len(part), 1, self.share * width, self.total)),
        )

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slot_index, :, self.position_index] = key[0].transpose(0, 1)
        values[self.slot_index, :, self.position_index] = value[0].transpose(0, 1)
        flat = query[0].transpose(0, 1)  # [N, H, d]
        output = torch.empty_like(flat, memory_format=torch.contiguous_format)
        for batch in self.batches:
            # The heads that share a key-value head become queries of it: [R, G, share * width, d].
            queries = flat[batch.places].unflatten(2, (-1, self.share)).permute(0, 2, 3, 1, 4).flatten(2, 3)
            cached_keys = keys[batch.slots, :, : self.total]
            cached_values = values[batch.slots, :, : self.total]
            out = F.scaled_dot_product_attention(
                queries, cached_keys, cached_values, attn_mask=batch.mask, scale=scaling
            )
            out = out.unflatten(2, (self.share, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
            output[batch.tokens] = out[batch.inside]
        return output[None]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros; on a CPU their memory is taken page by page when first written, so that unused context costs nothing."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
