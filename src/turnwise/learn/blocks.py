"""Attention over the blocks of a plan on CPU: flash kernels on slices, merged by log-sum-exp, with its own backward.

No mask, no gather, no repeated heads. The backward pass of each block gets the output and the log-sum-exp of all
blocks together, so that gradients are exact. In bfloat16, what several blocks add to is computed in float32 and rounded
once, as one kernel over all keys would do. Letters: N nodes, n queries, H heads, d width of a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.plan.blocks import Blocks, Rectangle, Square, within_window

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Relay:
    """Keys and values of all layers, and their gradients, handed from stretch to stretch of a long plan."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.key_grads: dict[int, Tensor] = {}
        self.value_grads: dict[int, Tensor] = {}

    def put(self, layer: int, start: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, values) [kv heads, N, d] of the layer, with those of a stretch written to their place."""
        for store, states in ((self.keys, key), (self.values, value)):
            if layer not in store:
                shape = (states.shape[2], states.shape[1], states.shape[3])
                store[layer] = states.new_zeros((self.num_tokens, *shape[1:])).transpose(0, 1)
            store[layer][:, start : start + states.shape[2]] = states[0].detach()
        return self.keys[layer], self.values[layer]

    def grads(self, layer: int) -> tuple[Tensor, Tensor]:
        """Gradients of the layer's keys and values so far."""
        for store, states in ((self.key_grads, self.keys), (self.value_grads, self.values)):
            if layer not in store:
                store[layer] = torch.zeros_like(states[layer], dtype=wide(states[layer].dtype))
        return self.key_grads[layer], self.value_grads[layer]

    @property
    def num_bytes(self) -> int:
        stores = (self.keys, self.values, self.key_grads, self.value_grads)
        return sum(x.numel() * x.element_size() for store in stores for x in store.values())


class BlockAttention:
    """Attention of a stretch of a plan, which begins at node `start`; with a relay its keys include those before.

    Layers with a window need the depth of the plan's nodes: a token sees those less than a window above it."""

    def __init__(
        self, blocks: Blocks, start: int = 0, relay: Relay | None = None, depth: NDArray[np.int32] | None = None
    ) -> None:
        self.blocks = blocks
        self.start = start
        self.relay = relay
        self.depth = depth
        self.windowed: dict[int, Blocks] = {}

    def blocks_in(self, window: int | None) -> Blocks:
        """The blocks of a layer."""
        if window is None:
            return self.blocks
        if window not in self.windowed:
            assert self.depth is not None
            self.windowed[window] = within_window(self.blocks, self.depth, window)
        return self.windowed[window]

    def mask(self, block: Rectangle, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[1, 1, queries, keys] to be added to the scores of a rectangle; None where all of its pairs count."""
        if window is None:
            return None
        assert self.depth is not None
        query, key = self.depth[block.start : block.end], self.depth[block.first_key : block.end_key]
        if query.max() - key.min() < window:
            return None
        hidden = torch.from_numpy(query[:, None] - key >= window)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[None, None]

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
        if window is not None:
            assert self.depth is not None, "a window needs the depth of nodes"
            window = window if self.depth.max() >= window else None
        # The kernels take the numbers of one head to stand side by side, whatever the strides say.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out: Tensor = Attention.apply(query, key, value, self, layer, scaling, sinks, window)  # type: ignore[no-untyped-call]
        return out


class Attention(torch.autograd.Function):
    """(query [1, H, n, d], key and value [1, kv heads, n, d], sinks [H] or None) -> [1, n, H, d].

    A sink is a key whose value is zero: it belongs to the log-sum-exp of all blocks, which scales the output, and to no
    block. Its score gets the gradient -exp(sink - lse) (out . gradient of out), summed over queries.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: BlockAttention,
        layer: int,
        scaling: float | None,
        sinks: Tensor | None,
        window: int | None,
    ) -> Tensor:
        q, k, v = query[0], key[0], value[0]
        if how.relay is not None:
            k, v = how.relay.put(layer, how.start, key, value)
        heads, count, width = q.shape
        exact = wide(q.dtype)
        out = q.new_empty((count, heads, width), dtype=exact)
        lse = q.new_empty((count, heads), dtype=exact)
        offset = how.start
        blocks = how.blocks_in(window)
        if blocks.rectangles:
            q, k, v = q.to(exact), k.to(exact), v.to(exact)
        for square in blocks.squares:
            here = slice(square.start - offset, square.end - offset)
            there = here if how.relay is None else slice(square.start, square.end)
            o, logsum = flash(
                *(rows(x, s, square) for x, s in ((q, here), (k, there), (v, there))), 0.0, True, scale=scaling
            )
            out[here] = o.transpose(1, 2).flatten(0, 1)
            lse[here] = logsum.transpose(1, 2).flatten(0, 1)
        for block in blocks.rectangles:
            here, there = queries(block, offset), keys(block, how)
            states = (q[None, :, here], k[None, :, there], v[None, :, there])
            o, logsum = flash(*states, 0.0, False, attn_mask=how.mask(block, window, q.dtype), scale=scaling)
            merge(out[here], lse[here], o[0].transpose(0, 1), logsum[0].transpose(0, 1))
        if sinks is not None:
            out.mul_(torch.sigmoid(lse - sinks.to(exact))[..., None])
            lse = torch.logaddexp(lse, sinks.to(exact))
        narrow = out.to(query.dtype)
        # A relay keeps keys and values itself.
        ctx.save_for_backward(query, narrow, lse, sinks, *(() if how.relay is not None else (key, value)))
        ctx.how, ctx.layer, ctx.scaling, ctx.window = how, layer, scaling, window
        return narrow[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, out, lse, sinks, *own_states = ctx.saved_tensors
        how, layer, scaling = ctx.how, ctx.layer, ctx.scaling
        assert how is not None, "a stretch with a relay is differentiated once"
        relay, offset = how.relay, how.start
        blocks = how.blocks_in(ctx.window)
        q, g = query[0], grads[0][0].transpose(0, 1)
        out, lse = out.transpose(0, 1), lse.transpose(0, 1)
        exact = wide(q.dtype)
        dq = torch.zeros_like(q, dtype=exact)
        if relay is None:
            k, v = (states[0] for states in own_states)
            dk, dv = torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
        else:
            k, v = relay.keys[layer], relay.values[layer]
            dk, dv = relay.grads(layer)
        if blocks.rectangles:
            q, k, v, g, out = (states.to(exact) for states in (q, k, v, g, out))
        for square in blocks.squares:
            here = slice(square.start - offset, square.end - offset)
            there = here if relay is None else slice(square.start, square.end)
            states = [rows(x, s, square) for x, s in ((g, here), (q, here), (k, there), (v, there), (out, here))]
            a, b, c = flash_backward(*states, rows(lse, here, square), 0.0, True, scale=scaling)
            for total, part, place in ((dq, a, here), (dk, b, there), (dv, c, there)):
                total[:, place] += part.transpose(0, 1).flatten(1, 2)
        for block in blocks.rectangles:
            here, there = queries(block, offset), keys(block, how)
            a, b, c = flash_backward(
                *(x[None, :, s] for x, s in ((g, here), (q, here), (k, there), (v, there), (out, here), (lse, here))),
                0.0,
                False,
                attn_mask=how.mask(block, ctx.window, q.dtype),
                scale=scaling,
            )
            for total, part, place in ((dq, a, here), (dk, b, there), (dv, c, there)):
                total[:, place] += part[0]
        if relay is not None:
            new_nodes = slice(offset, offset + q.shape[1])
            dk, dv = dk[:, new_nodes], dv[:, new_nodes]
            ctx.how = None  # whoever still holds the output must not hold the keys and values of the whole plan
        dsinks = None
        if sinks is not None:
            weight = torch.exp(sinks.to(exact)[:, None] - lse)
            dsinks = -(weight * (g.to(exact) * out.to(exact)).sum(-1)).sum(1).to(sinks.dtype)
        dq, dk, dv = (grad[None].to(query.dtype) for grad in (dq, dk, dv))
        return dq, dk, dv, None, None, None, dsinks, None


def wide(dtype: torch.dtype) -> torch.dtype:
    """What partial results are added up in."""
    return torch.promote_types(dtype, torch.float32)


def rows(states: Tensor, place: slice, square: Square) -> Tensor:
    """[count, heads, length, ...] of [heads, nodes, ...]: the chains of a square side by side."""
    apart: Tensor = states[:, place].unflatten(1, (square.count, square.length))
    return apart.transpose(0, 1)


def queries(block: Rectangle, offset: int) -> slice:
    return slice(block.start - offset, block.end - offset)


def keys(block: Rectangle, how: BlockAttention) -> slice:
    offset = how.start if how.relay is None else 0
    return slice(block.first_key - offset, block.end_key - offset)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add attention over further keys to what there is, in place: each counts by its share of the softmax."""
    share = torch.sigmoid(more_lse - lse)
    out.add_((more.to(out.dtype) - out).mul_(share[..., None]))
    torch.logaddexp(lse, more_lse, out=lse)
