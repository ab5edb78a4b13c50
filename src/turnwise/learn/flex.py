"""Attention over a plan on a GPU: one compiled kernel that skips the tiles in which no query sees a key.

Neither the compiled kernel nor its backward pass has been run: no GPU was at hand. What was compared with the CPU's
attention is the tiles and the mask inside them, by the same function uncompiled, which has no backward pass on a CPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from turnwise.plan.blocks import Nodes

TILE = 128
"""Queries and keys of a tile: the size that the kernel is tuned for."""

Tiles = NDArray[np.bool_]


class FlexAttention:
    """Attention of a whole plan, tree or packed, computed in one pass."""

    takes_any_width = True

    def __init__(self, exits: Nodes, device: str, depth: Nodes | None = None) -> None:
        self.exits = exits
        self.device = device
        self.depth = depth
        self.masks: dict[int | None, BlockMask] = {}
        self.kernel: Any = compiled() if device == "cuda" else flex_attention

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
        settings = {"block_mask": self.mask(window), "scale": scaling, "enable_gqa": True}
        if sinks is None:
            out: Tensor = self.kernel(query, key, value, **settings)
        else:
            out, extra = self.kernel(query, key, value, return_aux=AuxRequest(lse=True), **settings)
            out = out * torch.sigmoid(extra.lse - sinks[:, None])[..., None].to(out.dtype)
        return out.transpose(1, 2)

    def mask(self, window: int | None) -> BlockMask:
        """The mask of layers with a window, or without."""
        if window is not None:
            assert self.depth is not None, "a window needs the depth of nodes"
            window = window if self.depth.max() >= window else None
        if window not in self.masks:
            self.masks[window] = block_mask(self.exits, self.device, self.depth, window)
        return self.masks[window]


@cache
def compiled() -> Any:
    """The kernel, compiled when it is first called, and then for plans of any size."""
    return torch.compile(flex_attention, dynamic=True)


def block_mask(exits: Nodes, device: str, depth: Nodes | None = None, window: int | None = None) -> BlockMask:
    """Which tiles a kernel computes, those that need the mask apart from those in which every query sees every key."""
    ends = torch.as_tensor(exits).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    sees_both, (partial, full) = sees, tiles(exits)
    if window is not None:
        assert depth is not None
        places = torch.as_tensor(depth).to(device)

        def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return sees(batch, head, query, key) & (places[query] - places[key] < window)

        sees_both, (partial, full) = sees_near, tiles_within(depth, window, partial, full)
    size = len(exits)
    mask = BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=TILE, mask_mod=sees_both, seq_lengths=(size, size)
    )
    return mask.to(device)


def tiles(exits: Nodes) -> tuple[Tiles, Tiles]:
    """(tiles that need the mask, tiles that do not) [query tiles, key tiles], from the ends of subtrees.

    A query sees an earlier key until the key's subtree ends. So a tile of earlier keys is full if even the first of
    those subtrees to end reaches past the last query, and empty if none reaches the first. The queries' own tile is
    causal. A last tile of queries that is not whole is never full, as the kernel expects: it ends after all subtrees.
    """
    firsts = np.arange(0, len(exits), TILE)
    lasts = firsts + TILE - 1
    earlier = np.tri(len(firsts), k=-1, dtype=bool)
    full = earlier & (lasts[:, None] < np.minimum.reduceat(exits, firsts))
    some = earlier & (firsts[:, None] < np.maximum.reduceat(exits, firsts))
    return (some & ~full) | np.eye(len(firsts), dtype=bool), full


def tiles_within(depth: Nodes, window: int, partial: Tiles, full: Tiles) -> tuple[Tiles, Tiles]:
    """The same of layers with a window: without the tiles whose queries are all beyond it from every key, and with the
    mask for those in which one may be."""
    firsts = np.arange(0, len(depth), TILE)
    highest, lowest = np.minimum.reduceat(depth, firsts), np.maximum.reduceat(depth, firsts)
    some = highest[:, None] - lowest < window
    every = lowest[:, None] - highest < window
    return (partial & some) | (full & some & ~every), full & every


def listed(chosen: Tiles) -> tuple[Tensor, Tensor]:
    """([1, 1, rows] how many tiles of each row are chosen, [1, 1, rows, columns] which, those first)."""
    counts = chosen.sum(1, dtype=np.int32)
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(order)[None, None]
