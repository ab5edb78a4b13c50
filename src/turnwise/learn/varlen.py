"""Attention of chains that share nothing on a GPU: one call of flash attention's kernel for chains of any lengths.

The kernel has not been run: no GPU was at hand. What was tested is what it is called with, by one that computes the
same by definition.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.plan.blocks import Blocks

WIDEST = 256
"""Of a head, for the kernel."""


class VarlenAttention:
    """Causal attention within chains, with a window if a layer has one.

    The kernel takes 16-bit numbers, heads of one width, and gives no gradient to the log-sum-exp, which sinks need:
    layers with anything else are left to another attention.
    """

    takes_any_width = True

    def __init__(self, blocks: Blocks, device: str, otherwise: Callable[[], Callable[..., Tensor]]) -> None:
        from torch.nn.attention.varlen import varlen_attn  # late: it takes seconds to import

        assert not blocks.rectangles
        lengths = np.concatenate([np.full(square.count, square.length) for square in blocks.squares])
        edges = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        self.edges = torch.from_numpy(edges).to(device)
        """[chains + 1] where each begins."""
        self.longest = int(lengths.max())
        self.otherwise = cache(otherwise)
        self.kernel: Any = varlen_attn

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
        if sinks is not None or not suits(query, value):
            return self.otherwise()(layer, query, key, value, scaling, sinks=sinks, window=window)
        before = -1 if window is None or window >= self.longest else window - 1
        chains = [states[0].transpose(0, 1) for states in (query, key, value)]
        out: Tensor = self.kernel(
            *chains,
            self.edges,
            self.edges,
            self.longest,
            self.longest,
            scale=scaling,
            window_size=(before, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[None]


def suits(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes such states."""
    width = query.shape[-1]
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return narrow and width == value.shape[-1] and width % 8 == 0 and width <= WIDEST
