"""Log probabilities of chosen tokens and of buckets, and entropies, in tiles, recomputed in the backward pass.

Memory is that of one tile of logits, whatever the number of tokens and the size of the vocabulary. Where all of them
are few enough for a fixed budget they are kept instead, which saves computing them again. A tile has all places and
some of the vocabulary wherever it can: the weight of the output layer is then read, and where it must be cast, once a
pass, and its gradient is written once.

Buckets tell a distribution coarsely: k tokens, others in every place, have one each, and all the rest have the last.

Where a grammar guided the sampling, a mask has the tokens that it allowed: the others have no probability, no share in
an entropy and no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.learn.softmax import NEVER, Picks, Tally, VocabularyShard, log_sum

CHUNK_ELEMENTS = 1 << 21
"""Logits of a tile on a CPU: 8 MiB in float32, which its caches hold beside what they are made of."""
GPU_CHUNK_ELEMENTS = 1 << 26
"""The same on other devices: 256 MiB, enough for every product to keep a GPU busy."""
NARROWEST = 256
"""Columns that a tile has at least, before it has fewer places: the hidden states are read again for each tile."""
KEPT_ELEMENTS = 1 << 24
"""Most probabilities that are kept for the backward pass: 64 MiB in float32."""


class Mask(NamedTuple):
    """The tokens that are allowed at each of K places."""

    bits: Tensor
    """[sets, V / 8] a bit per token, the lowest of a byte first."""
    rows: Tensor
    """[K] the set of each place."""


class ChunkedLogprobs(torch.autograd.Function):
    """(hidden [K, d], weight [V, d], targets [K], temperature, mask or None, tokens [K, k] or None, shard or None) ->
    logprobs [K], entropies [K], and logprobs of buckets [K, k + 1], or [K, 0] where no tokens are given; in float32 at
    least."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        mask: Mask | None,
        tokens: Tensor | None,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        first = 0 if shard is None else shard.first
        tally = Tally(len(hidden), hidden, wide(hidden.dtype))
        looked_for = targets[:, None] if tokens is None else torch.cat([targets[:, None], tokens], 1)
        found = tally.total.new_zeros(looked_for.shape)
        rest = torch.full_like(tally.total, -math.inf)
        few = len(hidden) * len(weight) <= KEPT_ELEMENTS
        keep = any(ctx.needs_input_grad) and few and tokens is None  # the gradient of buckets needs logits anyway
        ctx.kept, ctx.highest = [], []
        for columns, part in parts(hidden, weight):
            for rows in rows_beside(hidden, part):
                logits = scaled_logits(hidden[rows], part, temperature, tally.total.dtype)
                logits = forbid(logits, mask, rows, first + columns.start)
                found[rows] += Picks.of(looked_for[rows], first + columns.start, len(part)).take(logits)
                if tokens is not None:
                    others = Picks.of(tokens[rows], first + columns.start, len(part)).rest(logits)
                    rest[rows] = torch.logaddexp(rest[rows], others)
                chances, highest = tally.add(rows, logits)
                ctx.highest.append(highest)
                if keep:
                    ctx.kept.append(chances)
        if shard is not None:
            tally.join(shard)
            found = shard.sum(found)
            rest = rest if tokens is None else log_sum(shard, rest)
        logprobs = tally.logprobs(found)
        buckets = logprobs[:, :0]
        if tokens is not None:
            buckets = torch.cat([logprobs[:, 1:], tally.logprobs(rest)[:, None]], 1)
        ctx.save_for_backward(hidden, weight, targets, tally.normalisers, tally.entropies, tokens, buckets)
        ctx.temperature, ctx.mask, ctx.shard = temperature, mask, shard
        ctx.set_materialize_grads(False)
        return logprobs[:, 0].contiguous(), tally.entropies, buckets.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalisers, *_ = ctx.saved_tensors
        incoming = [None if grad is None else grad / ctx.temperature for grad in grads]
        of_logprobs = incoming[0] = torch.zeros_like(normalisers) if incoming[0] is None else incoming[0]
        first = 0 if ctx.shard is None else ctx.shard.first
        grad_hidden = torch.zeros(hidden.shape, dtype=normalisers.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        highest = iter(ctx.highest)
        kept = iter(ctx.kept if incoming[1] is None else ())
        ctx.kept = []  # what is kept is used up here
        for columns, part in parts(hidden, weight):
            total = None
            for rows in rows_beside(hidden, part):
                grad = grad_of_tile(ctx, rows, first + columns.start, part, next(highest), next(kept, None), incoming)
                picks = Picks.of(targets[rows, None], first + columns.start, len(part))
                grad = picks.add(grad, of_logprobs[rows, None]).to(hidden.dtype)
                add_product(grad_hidden[rows], grad, part)
                if grad_weight is not None:
                    added = (grad.T, hidden[rows])
                    total = added[0] @ added[1] if total is None else add_product(total.to(normalisers.dtype), *added)
            if grad_weight is not None:
                grad_weight[columns] = 0.0 if total is None else total
        if ctx.shard is not None:
            ctx.shard.sum(grad_hidden)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None


def grad_of_tile(
    ctx: Any,
    rows: slice,
    first: int,
    part: Tensor,
    highest: Tensor,
    chances: Tensor | None,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """[n, w] the gradient of the logits of a tile, without that of the targets' own; with the chances that were kept
    if there are some."""
    hidden, _, _, normalisers, entropies, tokens, buckets = ctx.saved_tensors
    of_logprobs, of_entropies, of_buckets = grads
    assert of_logprobs is not None
    if chances is None:
        logits = scaled_logits(hidden[rows], part, ctx.temperature, normalisers.dtype)
        logits = forbid(logits, ctx.mask, rows, first)
        if of_entropies is None and of_buckets is None:
            chances = logits.sub_(highest[:, None]).exp_()
    if chances is not None:  # both ways to the same bits
        return chances.mul_((highest - normalisers[rows]).exp_().mul_(-of_logprobs[rows])[:, None])
    logprobs = logits.sub_(normalisers[rows, None])
    factor = -of_logprobs[rows, None]
    if of_entropies is not None:
        factor = factor - of_entropies[rows, None] * (logprobs + entropies[rows, None])
    if of_buckets is None:
        return logprobs.exp_().mul_(factor)
    grad = spread(logprobs, Picks.of(tokens[rows], first, len(part)), buckets[rows], of_buckets[rows])
    return grad.add_(logprobs.exp_().mul_(factor - of_buckets[rows].sum(-1, keepdim=True)))


def wide(dtype: torch.dtype) -> torch.dtype:
    """What logits are normalised in, and what partial results are added up in."""
    return torch.promote_types(dtype, torch.float32)


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Logits as the engine computes them: multiplied in the dtype of the hidden states, then widened and scaled."""
    logits = (hidden @ weight.to(hidden.dtype).T).to(dtype)
    return logits.div_(temperature) if temperature != 1.0 else logits


def forbid(logits: Tensor, mask: Mask | None, rows: slice, first: int) -> Tensor:
    """Logits [n, w] of some places and of tokens from `first` on, with NEVER for those that are not allowed there."""
    if mask is None:
        return logits
    end = first + logits.shape[1]
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = mask.bits[:, first // 8 : -(-end // 8)][mask.rows[rows]]
    forbidden = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, first % 8 :][:, : logits.shape[1]] == 0
    return logits.masked_fill_(forbidden, NEVER)


def add_product(total: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """total + one @ other, in place: added up in the dtype of the total, and where that is also theirs, while they are
    multiplied."""
    return total.addmm_(one, other) if total.dtype == one.dtype else total.add_(one @ other)


def bucketed(logprobs: Tensor, tokens: Tensor) -> Tensor:
    """[n, k + 1] of [n, V]: logprobs of the tokens, and of the rest; -inf of a rest of no tokens.

    The rest is a sum of its own and not what the tokens leave of 1, which would be lost in rounding where it is little.
    """
    rest = logprobs.scatter(1, tokens, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([logprobs.gather(1, tokens), rest], 1)


def spread(logprobs: Tensor, picks: Picks, buckets: Tensor, grads: Tensor) -> Tensor:
    """[n, w] gradient of buckets where it arrives: that of the rest falls to each of its tokens by its share in it."""
    shares = (logprobs - buckets[:, -1:]).exp_()  # not those of the tokens, which are written over
    return picks.put(shares.mul_(grads[:, -1:]), grads[:, :-1])


# ---------------------------------------------------------------- tiles


def budget(device: torch.device) -> int:
    """Logits of a tile."""
    return CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS


def parts(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(which tokens, their rows of the weight in the dtype of the hidden states) of the tiles, one after another."""
    width = max(NARROWEST, budget(hidden.device) // max(1, len(hidden)))
    for start in range(0, len(weight), width):
        columns = slice(start, min(start + width, len(weight)))
        yield columns, weight[columns].to(hidden.dtype)


def rows_beside(hidden: Tensor, part: Tensor) -> Iterator[slice]:
    """The places of the tiles of one part of the vocabulary."""
    yield from (slice(*edges) for edges in chunks(len(hidden), len(part), budget(hidden.device)))


def chunks(rows: int, columns: int, elements: int) -> list[tuple[int, int]]:
    """Runs of rows with no more than so many elements each, if a single row has not."""
    size = max(1, elements // max(1, columns))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


# ---------------------------------------------------------------- what is asked for


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    mask: Mask | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of its distribution, given the hidden state before it.

    With a shard the weight has the rows of this process only; all processes of its group must call.
    """
    found = ChunkedLogprobs.apply(hidden, weight, targets, temperature, mask, None, shard)  # type: ignore[no-untyped-call]
    logprobs, entropies, _ = found
    return logprobs, entropies


def bucket_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    tokens: Tensor,
    mask: Mask | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the logprobs of buckets [K, k + 1] by their tokens [K, k]."""
    found = ChunkedLogprobs.apply(hidden, weight, targets, temperature, mask, tokens, shard)  # type: ignore[no-untyped-call]
    logprobs, entropies, buckets = found
    return logprobs, entropies, buckets


@torch.no_grad()
def likeliest(
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    count: int,
    vocabulary: int,
    mask: Mask | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """The likeliest of the first `vocabulary` tokens after each hidden state [K, count], and the logprobs of their
    buckets [K, count + 1], to which all others belong."""
    first, size = (0, len(weight)) if shard is None else (shard.first, shard.size)
    tally = Tally(len(hidden), hidden, wide(hidden.dtype))
    tokens = torch.empty(len(hidden), count, dtype=torch.long, device=hidden.device)
    found = tally.total.new_empty(tokens.shape)
    rest = torch.empty_like(tally.total)
    narrow = weight.to(hidden.dtype)
    # As many runs on every process of a group, because each of them waits for the others.
    for edges in chunks(len(hidden), size, budget(hidden.device)):
        rows = slice(*edges)
        logits = forbid(scaled_logits(hidden[rows], narrow, temperature, wide(hidden.dtype)), mask, rows, first)
        tokens[rows] = highest_tokens(logits, count, vocabulary, first, shard)
        picks = Picks.of(tokens[rows], first, len(weight))
        found[rows], rest[rows] = picks.take(logits), picks.rest(logits)
        tally.add(rows, logits)
    if shard is not None:
        tally.join(shard)
        found, rest = shard.sum(found), log_sum(shard, rest)
    return tokens, torch.cat([tally.logprobs(found), tally.logprobs(rest)[:, None]], 1)


def highest_tokens(logits: Tensor, count: int, vocabulary: int, first: int, shard: VocabularyShard | None) -> Tensor:
    """[n, count] of the first `vocabulary` tokens those with the highest logits [n, w], the highest first."""
    logits = logits[:, : max(0, vocabulary - first)]
    if shard is None:
        return logits.topk(count).indices
    highest, places = logits.topk(min(count, logits.shape[1]))
    missing = count - highest.shape[1]
    highest = shard.gather(torch.nn.functional.pad(highest, (0, missing), value=-math.inf))
    tokens = shard.gather(torch.nn.functional.pad(places + first, (0, missing)))
    return tokens.gather(1, highest.topk(count).indices)
