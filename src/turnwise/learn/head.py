"""Log probabilities and entropies of chosen tokens, in chunks, recomputed in the backward pass.

Memory is that of one chunk of logits, whatever the number of tokens and the size of the vocabulary. Where all of them
are few enough for a fixed budget they are kept instead, which saves computing them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
KEPT_ELEMENTS = 1 << 24
"""Most probabilities that are kept for the backward pass: 64 MiB in float32."""


class ChunkedLogprobs(torch.autograd.Function):
    """(hidden [K, d], weight [V, d], targets [K], temperature) -> logprobs [K], entropies [K], in float32 at least."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        keep = any(ctx.needs_input_grad) and len(hidden) * len(weight) <= KEPT_ELEMENTS
        ctx.kept = [] if keep else None
        for start, end in chunks(len(hidden), len(weight)):
            logits = scaled_logits(hidden[start:end], weight, temperature, wide)
            total = torch.logsumexp(logits, -1)
            normalisers[start:end] = total
            logprobs[start:end] = logits.gather(1, targets[start:end, None])[:, 0] - total
            logits.sub_(total[:, None])
            chances = logits.exp()
            entropies[start:end] = -logits.mul_(chances).sum(-1)
            if keep:
                ctx.kept.append(chances)
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_logprobs, grad_entropies = grads
        hidden, weight, targets, normalisers, entropies = ctx.saved_tensors
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
                logits.sub_(normalisers[start:end, None])
                if with_entropy:
                    factor = factor - grad_entropies[start:end, None] * (logits + entropies[start:end, None])
                grad = logits.exp_().mul_(factor)
            grad.scatter_add_(1, targets[start:end, None], grad_logprobs[start:end, None])
            grad.div_(ctx.temperature)
            grad = grad.to(hidden.dtype)
            grad_hidden[start:end] = grad @ weight.to(hidden.dtype)
            grad_weight += (grad.T @ hidden[start:end]).to(wide)
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Logits as the engine computes them: multiplied in the dtype of the hidden states, then widened and scaled."""
    logits = (hidden @ weight.to(hidden.dtype).T).to(dtype)
    return logits.div_(temperature) if temperature != 1.0 else logits


def chunks(rows: int, columns: int) -> list[tuple[int, int]]:
    size = max(1, CHUNK_ELEMENTS // max(1, columns))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of its distribution, given the hidden state before it."""
    logprobs, entropies = ChunkedLogprobs.apply(hidden, weight, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropies
