"""Attention over a plan on a GPU: one compiled kernel that skips the tiles in which no query sees a key.

Neither the compiled kernel nor its backward pass has been run: no GPU was at hand. Both were compiled for three GPUs
(benchmarks/compile_flex.py). What was compared with the CPU's attention is the same function uncompiled, forward and
backward, whose backward pass torch keeps from users of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.fx.experimental._config as shape_settings
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from turnwise.learn.blocks import Relay
from turnwise.plan.blocks import Nodes

TILE = 128
"""Queries and keys of a tile: the size that the kernel is tuned for."""

Tiles = NDArray[np.bool_]


class FlexAttention:
    """Attention of nodes from `start` to `end` of a plan, tree or packed, in one call; by default of all.

    With a relay the keys include those of the nodes before, and the gradients of these are handed back through it.
    """

    takes_any_width = True

    def __init__(
        self,
        exits: Nodes,
        device: str,
        depth: Nodes | None = None,
        start: int = 0,
        end: int | None = None,
        relay: Relay | None = None,
    ) -> None:
        self.exits = exits
        self.device = device
        self.depth = depth
        self.start = start
        self.end = len(exits) if end is None else end
        self.relay = relay
        assert relay is not None or start == 0, "keys of earlier nodes come from a relay"
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
        if self.relay is not None:
            key, value = Handover.apply(key, value, self.relay, layer, self.start)  # type: ignore[no-untyped-call]
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
            depth = self.depth if window is not None else None
            self.masks[window] = block_mask(self.exits[: self.end], self.device, depth, window, self.start)
        return self.masks[window]


class Handover(torch.autograd.Function):
    """(key, value [1, kv heads, n, d] of a stretch) -> [1, kv heads, nodes up to its end, d], from a relay that keeps
    them. Backward: the gradients of all are added to the relay's, of which those of the stretch are then complete,
    because later stretches are differentiated first."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, relay: Relay, layer: int, start: int) -> tuple[Tensor, Tensor]:
        ctx.place = relay, layer, start
        ctx.end = end = start + key.shape[2]
        keys, values = relay.put(layer, start, key, value)
        return until(keys, end), until(values, end)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.place is not None, "a stretch with a relay is differentiated once"
        relay, layer, start = ctx.place
        ctx.place = None  # whoever still holds the output must not hold the keys and values of the whole plan
        complete = []
        for total, grad in zip(relay.grads(layer), grads, strict=True):
            total[:, : ctx.end] += grad[0]
            complete.append(total[None, :, start : ctx.end].to(grad.dtype))
        return *complete, None, None, None


def until(states: Tensor, end: int) -> Tensor:
    """[1, heads, end, d] of a relay's [heads, N, d], without a copy.

    The first stride is that of states which end there: nobody steps along it, but torch would compile another kernel.
    """
    heads, _, width = states.shape
    return states.detach().as_strided((1, heads, end, width), (end * states.stride(1), *states.stride()))


@cache
def compiled() -> Callable[..., Any]:
    """The kernel, compiled when it is first called, and then for plans of any size."""
    return for_any_size(torch.compile(flex_attention, dynamic=True))


def for_any_size(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same without torch's guess that sizes which are equal when it is compiled always will be: as many tiles as
    heads, or as many queries as keys."""

    def call(*states: Tensor, **how: Any) -> Any:
        with shape_settings.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return kernel(*states, **how)

    return call


def block_mask(
    exits: Nodes, device: str, depth: Nodes | None = None, window: int | None = None, start: int = 0
) -> BlockMask:
    """Which tiles a kernel computes, those that need the mask apart from those in which every query sees every key.
    Keys are all nodes, queries those from `start` on."""
    size = len(exits)
    ends = torch.as_tensor(exits).to(device)
    first = torch.tensor(start, dtype=torch.int32).to(device)  # a number would be compiled into the kernel

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query + first
        return (key <= place) & (place < ends[key])

    sees_both, (partial, full) = sees, tiles(exits, start)
    if window is not None:
        assert depth is not None
        places = torch.as_tensor(depth[:size]).to(device)

        def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return sees(batch, head, query, key) & (places[query + first] - places[key] < window)

        sees_both, (partial, full) = sees_near, tiles_within(depth[:size], window, partial, full, start)
    mask = BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=TILE, mask_mod=sees_both, seq_lengths=(size - start, size)
    )
    return mask.to(device)


def tiles(exits: Nodes, start: int = 0) -> tuple[Tiles, Tiles]:
    """(tiles that need the mask, tiles that do not) [query tiles, key tiles], from the ends of subtrees.

    A query sees an earlier key until the key's subtree ends. So a tile of earlier keys is full if even the first of
    those subtrees to end reaches past the last query, and empty if none reaches the first. A tile with a query's own
    key is causal. A last tile of queries that is not whole is never full, as the kernel expects.
    """
    size = len(exits)
    queries, keys = np.arange(start, size, TILE)[:, None], np.arange(0, size, TILE)
    last_queries = queries + TILE - 1
    full = (keys + TILE - 1 <= queries) & (last_queries < np.minimum.reduceat(exits, keys)) & (last_queries < size)
    some = (keys <= last_queries) & (queries < np.maximum.reduceat(exits, keys))
    return some & ~full, full


def tiles_within(depth: Nodes, window: int, partial: Tiles, full: Tiles, start: int = 0) -> tuple[Tiles, Tiles]:
    """The same of layers with a window: without the tiles whose queries are all beyond it from every key, and with the
    mask for those in which one may be."""
    (highest, lowest), (highest_key, lowest_key) = (
        (np.minimum.reduceat(part, firsts), np.maximum.reduceat(part, firsts))
        for part in (depth[start:], depth)
        for firsts in [np.arange(0, len(part), TILE)]
    )
    some = highest[:, None] - lowest_key < window
    every = lowest[:, None] - highest_key < window
    return (partial & some) | (full & some & ~every), full & every


def listed(chosen: Tiles) -> tuple[Tensor, Tensor]:
    """([1, 1, rows] how many tiles of each row are chosen, [1, 1, rows, columns] which, those first).

    Of either there are two at least, the second then without a tile: for one alone torch would compile another kernel.
    """
    missing = [(0, max(0, 2 - size)) for size in chosen.shape]
    chosen = np.pad(chosen, missing)
    counts = chosen.sum(1, dtype=np.int32)
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(order)[None, None]
