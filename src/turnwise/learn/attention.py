"""Attention over plans, plugged into transformers through its attention interface.

A model whose attention is `turnwise` receives an `attend` callable with every forward pass: the learner passes one
that knows a plan, an engine one that knows its cache. The module itself stays as transformers ships it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnwise.plan.plan import Plan

Attend = Callable[[int, Tensor, Tensor, Tensor, float | None], Tensor]
"""(layer, query [1, heads, N, d], key, value [1, key-value heads, N, d], scaling) -> [1, N, heads, d]."""

NAME = "turnwise"


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    # Under autocast the rotary embedding returns queries and keys in float32, beside values in the compute dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


def register() -> None:
    """Make the attention known to transformers; harmless when repeated."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


class PackedAttention:
    """Causal attention within each chain of a packed plan: chains of equal length in one call, no mask, no padding."""

    def __init__(self, plan: Plan) -> None:
        self.chains = plan.chains
        self.sizes = [length * count for length, count in plan.chains]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        outputs = []
        shared_heads = query.shape[1] != key.shape[1]
        parts = zip(
            self.chains, query.split(self.sizes, 2), key.split(self.sizes, 2), value.split(self.sizes, 2), strict=True
        )
        for (length, count), q, k, v in parts:
            q, k, v = (x.unflatten(2, (count, length))[0].transpose(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared_heads)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[None]
