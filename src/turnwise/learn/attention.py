"""Attention over plans, plugged into transformers through its attention interface.

A model whose attention is `turnwise` receives an `attend` callable with every forward pass: the learner passes one
that knows a plan, an engine one that knows its cache. The module itself stays as transformers ships it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnwise.learn.blocks import BlockAttention, Relay
from turnwise.learn.flex import FlexAttention
from turnwise.learn.routers import ARGUMENT, PassRoutes
from turnwise.learn.varlen import VarlenAttention
from turnwise.plan.blocks import Blocks
from turnwise.plan.plan import Plan, Stretch
from turnwise.pretrained import CausalLM, import_models

Attend = Callable[..., Tensor]
"""(layer, query [1, heads, N, d], key, value [1, key-value heads, N, d], scaling) -> [1, N, heads, d], with `sinks`
[heads] and `window` where the layer has them.

A token of a layer with a window sees the last `window` tokens of its path, itself included. A sink is one more score in
the softmax of every query of its head, with a value of zero: it takes a share and gives nothing (arXiv:2309.17453)."""

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
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if others.get("softcap") is not None:
        raise ValueError("this model's attention has more to it (softcap), which is not supported")
    # Some rotary embeddings return queries and keys in float32, beside values in the compute dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    width, value_width = query.shape[-1], value.shape[-1]
    if value_width != width and not getattr(attend, "takes_any_width", False):
        scaling = width**-0.5 if scaling is None else scaling
        query, key, value = (widened(states, max(width, value_width)) for states in (query, key, value))
    more: dict[str, Any] = {"sinks": s_aux, "window": sliding_window}
    more = {name: given for name, given in more.items() if given is not None}
    out = attend(module.layer_idx, query, key, value, scaling, **more)
    return out[..., :value_width], None


def widened(states: Tensor, width: int) -> Tensor:
    """States with zeros after each head's numbers: they change no score, and what they add to the output is cut off."""
    return F.pad(states, (0, width - states.shape[-1])) if states.shape[-1] < width else states


def register() -> None:
    """Make the attention known to transformers; harmless when repeated."""
    import_models()
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def attend_with_plans(model: CausalLM) -> None:
    """Have a model leave its attention to what is handed to its passes."""
    register()
    model.set_attn_implementation(NAME)


def states_of(
    model: CausalLM, plan: Plan, stretch: Stretch, attend: Attend, routes: PassRoutes | None = None
) -> Tensor:
    """[n, width] the last hidden states of a stretch of a plan; with `routes`, routers replay or record them."""
    tokens, places = (
        torch.as_tensor(array[stretch.start : stretch.end]).long()[None].to(model.device)
        for array in (plan.tokens, plan.depth)
    )
    more: dict[str, Any] = {} if routes is None else {ARGUMENT: routes}
    output = model.base_model(input_ids=tokens, position_ids=places, use_cache=False, attend=attend, **more)
    states: Tensor = output.last_hidden_state[0]
    return states


def attention_of(plan: Plan, stretch: Stretch, device: str, relay: Relay | None = None) -> Attend:
    """The attention of a stretch of a plan on a device."""
    if device == "cpu":
        return BlockAttention(stretch.blocks, stretch.start, relay, plan.depth)
    if device == "cuda":
        flex = partial(FlexAttention, plan.exit, device, plan.depth, stretch.start, stretch.end, relay)
        if relay is not None or stretch.blocks.rectangles:
            return flex()
        return VarlenAttention(stretch.blocks, device, flex) if has_varlen() else PackedAttention(stretch.blocks, flex)
    if relay is not None:
        longest = int(plan.depth.max()) + 1
        raise ValueError(
            f"a turn of {longest} tokens does not fit in one pass, and {device} computes no more than that; "
            f"raise max_tokens_per_microbatch to {longest}"
        )
    if stretch.blocks.rectangles:
        raise ValueError(f'shared prefixes are not computed on {device}; set layout = "packed"')
    return PackedAttention(stretch.blocks)


@cache
def has_varlen() -> bool:
    """Whether flash attention has kernels for the GPU."""
    return torch.cuda.get_device_capability() >= (8, 0)


class PackedAttention:
    """Causal attention within chains that share nothing, on any device: chains of equal length in one call.

    Its kernel knows no window and does not tell the log-sum-exp, which sinks need: layers with either are left to
    another attention, if there is one.
    """

    def __init__(self, blocks: Blocks, otherwise: Callable[[], Attend] | None = None) -> None:
        assert not blocks.rectangles
        self.otherwise = None if otherwise is None else cache(otherwise)
        self.squares = blocks.squares
        self.sizes = [square.length * square.count for square in blocks.squares]

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
        is_cut = window is not None and window < max((square.length for square in self.squares), default=0)
        if sinks is not None or is_cut:
            if self.otherwise is None:
                raise ValueError("sinks and windows are computed on cuda and cpu only; set model.device to one of them")
            return self.otherwise()(layer, query, key, value, scaling, sinks=sinks, window=window)
        outputs = []
        shared_heads = query.shape[1] != key.shape[1]
        parts = zip(
            self.squares, query.split(self.sizes, 2), key.split(self.sizes, 2), value.split(self.sizes, 2), strict=True
        )
        for square, q, k, v in parts:
            q, k, v = (x.unflatten(2, (square.count, square.length))[0].transpose(0, 1) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=shared_heads)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[None]
