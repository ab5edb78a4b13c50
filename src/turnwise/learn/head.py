"""Log probabilities of chosen tokens and of buckets, and entropies, in chunks, recomputed in the backward pass.

Memory is that of one chunk of logits, whatever the number of tokens and the size of the vocabulary. Where all of them
are few enough for a fixed budget they are kept instead, which saves computing them again.

Buckets tell a distribution coarsely: k tokens, others in every place, have one each, and all the rest have the last.

Where a grammar guided the sampling, a mask has the tokens that it allowed: the others have no probability, no share in
an entropy and no gradient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
KEPT_ELEMENTS = 1 << 24
"""Most probabilities that are kept for the backward pass: 64 MiB in float32."""


NEVER = -1e30
"""The logit of a token that is not allowed: its probability is exactly 0, and unlike infinity it may be multiplied by
that."""


class Mask(NamedTuple):
    """The tokens that are allowed at each of K places."""

    bits: Tensor
    """[sets, V / 8] a bit per token, the lowest of a byte first."""
    rows: Tensor
    """[K] the set of each place."""


class ChunkedLogprobs(torch.autograd.Function):
    """(hidden [K, d], weight [V, d], targets [K], temperature, mask or None, tokens [K, k] or None) -> logprobs [K],
    entropies [K], and logprobs of buckets [K, k + 1], or [K, 0] where no tokens are given; in float32 at least."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        mask: Mask | None,
        tokens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        buckets = logprobs.new_empty(len(hidden), 0 if tokens is None else tokens.shape[1] + 1)
        few = len(hidden) * len(weight) <= KEPT_ELEMENTS
        keep = any(ctx.needs_input_grad) and few and tokens is None  # the gradient of buckets needs logits anyway
        ctx.kept = [] if keep else None
        for start, end in chunks(len(hidden), len(weight)):
            logits = forbid(scaled_logits(hidden[start:end], weight, temperature, wide), mask, start, end)
            total = torch.logsumexp(logits, -1)
            normalisers[start:end] = total
            logprobs[start:end] = logits.gather(1, targets[start:end, None])[:, 0] - total
            logits.sub_(total[:, None])
            if tokens is not None:
                buckets[start:end] = bucketed(logits, tokens[start:end])
            chances = logits.exp()
            entropies[start:end] = -logits.mul_(chances).sum(-1)
            if keep:
                ctx.kept.append(chances)
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies, tokens, buckets)
        ctx.temperature, ctx.mask = temperature, mask
        return logprobs, entropies, buckets

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_logprobs, grad_entropies, grad_buckets = grads
        hidden, weight, targets, normalisers, entropies, tokens, buckets = ctx.saved_tensors
        wide = normalisers.dtype
        with_entropy = bool(grad_entropies.any())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        kept = None if with_entropy or ctx.kept is None else ctx.kept
        ctx.kept = None  # what is kept is used up here
        for number, (start, end) in enumerate(chunks(len(hidden), len(weight))):
            factor = -grad_logprobs[start:end, None]
            if kept is not None:
                grad = kept[number].mul_(factor)
            else:
                logits = scaled_logits(hidden[start:end], weight, ctx.temperature, wide)
                logits = forbid(logits, ctx.mask, start, end)
                logits.sub_(normalisers[start:end, None])
                if with_entropy:
                    factor = factor - grad_entropies[start:end, None] * (logits + entropies[start:end, None])
                if tokens is None:
                    grad = logits.exp_().mul_(factor)
                else:
                    grad = spread(logits, tokens[start:end], buckets[start:end], grad_buckets[start:end])
                    grad += logits.exp_().mul_(factor - grad_buckets[start:end].sum(-1, keepdim=True))
            grad.scatter_add_(1, targets[start:end, None], grad_logprobs[start:end, None])
            grad.div_(ctx.temperature)
            grad = grad.to(hidden.dtype)
            grad_hidden[start:end] = grad @ weight.to(hidden.dtype)
            grad_weight += (grad.T @ hidden[start:end]).to(wide)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Logits as the engine computes them: multiplied in the dtype of the hidden states, then widened and scaled."""
    logits = (hidden @ weight.to(hidden.dtype).T).to(dtype)
    return logits.div_(temperature) if temperature != 1.0 else logits


def forbid(logits: Tensor, mask: Mask | None, start: int, end: int) -> Tensor:
    """Logits [n, V] of the places from start to end, with NEVER for tokens that are not allowed there."""
    if mask is None:
        return logits
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = mask.bits[mask.rows[start:end]]
    forbidden = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]] == 0
    return logits.masked_fill_(forbidden, NEVER)


def bucketed(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """[n, k + 1] of [n, V]: logprobs of the tokens, and of the rest; -inf of a rest of no tokens.

    The rest is a sum of its own and not what the tokens leave of 1, which would be lost in rounding where it is little.
    """
    rest = logprobs.scatter(1, tokens, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([logprobs.gather(1, tokens), rest], 1)


def spread(logprobs: Tensor, tokens: Tensor, buckets: Tensor, grads: Tensor) -> Tensor:
    """[n, V] gradient of buckets where it arrives: that of the rest falls to each of its tokens by its share in it."""
    shares = (logprobs - buckets[:, -1:]).exp_()  # not those of the tokens, which are written over
    return shares.mul_(grads[:, -1:]).scatter_(1, tokens, grads[:, :-1])


def chunks(rows: int, columns: int) -> list[tuple[int, int]]:
    size = max(1, CHUNK_ELEMENTS // max(1, columns))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, mask: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of its distribution, given the hidden state before it."""
    found = ChunkedLogprobs.apply(hidden, weight, targets, temperature, mask, None)  # type: ignore[no-untyped-call]
    logprobs, entropies, _ = found
    return logprobs, entropies


def bucket_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, tokens: Tensor, mask: Mask | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the logprobs of buckets [K, k + 1] by their tokens [K, k]."""
    found = ChunkedLogprobs.apply(hidden, weight, targets, temperature, mask, tokens)  # type: ignore[no-untyped-call]
    logprobs, entropies, buckets = found
    return logprobs, entropies, buckets


@torch.no_grad()
def likeliest(
    hidden: Tensor, weight: Tensor, temperature: float, count: int, vocabulary: int, mask: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """The likeliest of the first `vocabulary` tokens after each hidden state [K, count], and the logprobs of their
    buckets [K, count + 1], to which all others belong."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    tokens = torch.empty(len(hidden), count, dtype=torch.long, device=hidden.device)
    buckets = torch.empty(len(hidden), count + 1, dtype=wide, device=hidden.device)
    for start, end in chunks(len(hidden), len(weight)):
        logprobs = forbid(scaled_logits(hidden[start:end], weight, temperature, wide), mask, start, end)
        logprobs.sub_(torch.logsumexp(logprobs, -1, keepdim=True))
        tokens[start:end] = logprobs[:, :vocabulary].topk(count).indices
        buckets[start:end] = bucketed(logprobs, tokens[start:end])
    return tokens, buckets
