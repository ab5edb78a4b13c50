"""Drawing tokens from logits, a batch at a time, by inverse CDF.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """How each row's distribution is shaped before drawing; `None` where no row asks for it."""

    temperature: Tensor | None
    """[B] with 0 for greedy rows."""
    top_p: Tensor | None
    """[B]"""
    top_k: Tensor | None
    """[B] with 0 for all."""


def draw(logits: Tensor, shape: Shape, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [B], logprobs [B]) from logits [B, V] and uniform noise [B] in [0, 1)."""
    logits = logits.float()
    greedy = None
    if shape.temperature is not None:
        greedy = shape.temperature == 0
        logits = logits / torch.where(greedy, 1.0, shape.temperature)[:, None]
    if shape.top_k is not None:
        logits = keep_top_k(logits, shape.top_k)
    logprobs = logits.log_softmax(-1)
    if shape.top_p is not None:
        logprobs = keep_top_p(logprobs, shape.top_p)
    wide = torch.float32 if logits.device.type == "mps" else torch.float64  # mps has no float64
    cumulative = logprobs.exp().to(wide).cumsum(-1)
    threshold = noise.to(wide)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    if chosen.isnan().any():
        raise RuntimeError("the model's logits are not numbers")
    if greedy is not None:
        chosen = torch.where(greedy, 0.0, chosen)
    return tokens, chosen


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Logits with all but each row's k largest at minus infinity."""
    ordered = logits.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, logits.shape[-1]).clamp(max=logits.shape[-1]) - 1
    return logits.masked_fill(logits < ordered.gather(1, last[:, None]), -torch.inf)


def keep_top_p(logprobs: Tensor, top_p: Tensor) -> Tensor:
    """Logprobs renormalised over each row's smallest set of likeliest tokens with at least mass p."""
    ordered, index = logprobs.sort(-1, descending=True)
    mass = ordered.exp().cumsum(-1)
    beyond = (mass - ordered.exp()) >= top_p[:, None]
    beyond[:, 0] = False
    beyond &= top_p[:, None] < 1.0
    dropped = torch.zeros_like(beyond).scatter(1, index, beyond)
    return logprobs.masked_fill(dropped, -torch.inf).log_softmax(-1)
