"""Attention that computes nothing: it keeps what a flash kernel keeps, and counts what one would compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise.learn.blocks import Relay
from turnwise.preflight.operation_counter import KEYS_AND_VALUES, LAYERS, OperationCounter, size_of

FORWARD, BACKWARD = 4.0, 10.0
"""Floating-point operations of a pair of tokens, by heads and their width: two products, and five in the backward pass,
which computes the scores again."""


class KeptAttention:
    """Stands in for the kernel that a GPU would run. It keeps queries, keys, values, the output and the log-sum-exp of
    every query, whatever the mask; how much it computes is by the pairs of the plan."""

    takes_any_width = True

    def __init__(self, counter: OperationCounter, num_pairs: int, start: int = 0, relay: Relay | None = None) -> None:
        self.counter = counter
        self.num_pairs = num_pairs
        self.start = start
        self.relay = relay
        """Of a plan of several passes: it keeps keys, values and their gradients of all layers."""

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
            self.relay.put(layer, self.start, key, value)
        out: Tensor = KeptStates.apply(query, key, value, self, layer)  # type: ignore[no-untyped-call]
        return out

    def count(self, factor: float, *states: Tensor) -> None:
        query, value = states[0], states[2]
        widths = (query.shape[-1] + value.shape[-1]) / 2
        flops = factor * self.num_pairs * query.shape[1] * widths
        self.counter.add(LAYERS, flops, float(sum(size_of(each) for each in states)))


class KeptStates(torch.autograd.Function):
    """(query [1, H, n, d], key, value [1, kv heads, n, d]) -> [1, n, H, d]"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: KeptAttention, layer: int) -> Tensor:
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        logsums = query.new_empty(query.shape[:3], dtype=torch.float32)
        for states in (key, value):
            how.counter.memory.mark(states, KEYS_AND_VALUES)
        how.count(FORWARD, query, key, value, out)
        ctx.save_for_backward(query, key, value, out, logsums)
        ctx.how, ctx.layer = how, layer
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, _ = ctx.saved_tensors
        found = tuple(torch.empty_like(states) for states in (query, key, value))
        ctx.how.count(BACKWARD, query, key, value, out, grads[0], *found)
        if ctx.how.relay is not None:
            ctx.how.relay.grads(ctx.layer)
        return (*found, None, None)
