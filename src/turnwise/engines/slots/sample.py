"""Drawing tokens from logits, a batch at a time, by inverse CDF.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
LAST = {torch.float64: 1 - 2.0**-52, torch.float32: 1 - 2.0**-23}
"""The largest share that is less than the whole."""


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """How a token of each row is drawn; `None` where no row asks for it."""

    temperature: Tensor | None
    """[B] with 0 for greedy rows."""
    top_p: Tensor | None
    """[B]"""
    top_k: Tensor | None
    """[B] with 0 for all."""


def draw(logits: Tensor, sampling: BatchSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [B], logprobs [B]) from logits [B, V] and uniform noise [B] in [0, 1). A row whose logits are NaN has NaN
    for its logprob, and its token has no meaning."""
    logits = logits.float()
    greedy = None
    if sampling.temperature is not None:
        greedy = sampling.temperature == 0
        logits = logits / torch.where(greedy, 1.0, sampling.temperature)[:, None]
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits.log_softmax(-1), sampling.top_p)
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    tokens, total = invert(weights, noise)
    if greedy is not None:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    chosen = (logits.gather(1, tokens[:, None]) - top)[:, 0] - total.log().float()
    if greedy is not None:
        chosen = torch.where(greedy & ~chosen.isnan(), 0.0, chosen)
    return tokens, chosen


def invert(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(the token at which each row's running sum of weights passes its share `noise` of the total, that total).

    The sums of blocks are added up first, and only the block that decides is read in detail: a running sum in float64
    over a whole vocabulary would cost more than everything else here.
    """
    wide = torch.float32 if weights.device.type == "mps" else torch.float64  # mps has no float64
    spare = -weights.shape[-1] % BLOCK
    blocks = (F.pad(weights, (0, spare)) if spare else weights).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).to(wide).cumsum(-1)
    total = sums[:, -1]
    threshold = noise.to(wide) * total
    block = torch.searchsorted(sums, threshold[:, None], right=True).clamp_(max=sums.shape[-1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].to(wide).cumsum(-1)
    # Rounding may leave a share of 1 or more of the block, whose last weights may be 0.
    share = ((threshold[:, None] - before) / (sums.gather(1, block) - before)).clamp_(max=LAST[wide])
    in_block = torch.searchsorted(inside, share * inside[:, -1:], right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + in_block)[:, 0].clamp_(max=weights.shape[-1] - 1), total


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
