"""Attention of a pass over cached keys and values: one flash kernel per run of memory, merged by log-sum-exp. Short
prompts of like length share one kernel.

Letters: N tokens of the pass, H heads, G key-value heads, d head size, R rows of a bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.slots.alike import PaddedRuns, grouped
from turnwise.engines.slots.kv_layout import KVLayout
from turnwise.engines.slots.passes import Pass, Prefill, PrefixRead
from turnwise.engines.slots.row_cache import RowBucket, RowCache

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class BucketRows:
    """The rows of a bucket in a pass: each writes one token and attends to the whole row."""

    bucket: RowBucket
    index: Tensor | None
    """[R] the index of their tokens in the pass; None where the pass has these tokens only, in this order"""
    longest: int
    """Tokens of the longest row, the new one included."""
    mask: Tensor | None
    """[R, 1, 1, longest] to be added; None where all rows have the same length"""
    targets: list[Tensor]
    """[R G] per kind of layer: where new keys go, and values too, in those of a layer laid out flat"""


class PassAttention:
    """The `attend` of one pass: writes the new keys and values, then attends to them and to all before them."""

    def __init__(self, layout: KVLayout, batch: Pass, rows: RowCache, lengths: NDArray[np.int64]) -> None:
        """`lengths` by slot: tokens that a slot's row holds already."""
        self.layout = layout
        self.batch = batch
        buckets = rows.buckets.values()
        index_of = dict(zip(batch.slots.tolist(), batch.slot_index.tolist(), strict=True))
        row_index = [np.array([index_of[slot] for slot in bucket.slots], np.int64) for bucket in buckets]
        groups, self.alone = grouped(batch.prefills, lambda prefill: prefill.count)
        self.together = [runs_of(group, layout.device) for group in groups]
        prefill_index = [np.arange(prefill.start, prefill.start + prefill.count) for prefill in self.alone]
        prefill_index += [runs.index for runs in self.together]
        # Prefills and buckets are computed one after the other, and then put back into the order of the pass.
        computed = np.concatenate([*prefill_index, *row_index])
        in_order = bool((computed[:-1] < computed[1:]).all())
        self.buckets = [
            self.bucket_rows(bucket, None if in_order and len(index) == batch.size else index, lengths)
            for bucket, index in zip(buckets, row_index, strict=True)
        ]
        pass_order = np.empty(len(computed), np.int64)
        pass_order[computed] = np.arange(len(computed))
        self.pass_order = None if in_order else self.tensor(pass_order)

    def tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.layout.device)

    def bucket_rows(self, bucket: RowBucket, index: NDArray[np.int64] | None, lengths: NDArray[np.int64]) -> BucketRows:
        slots = np.array(bucket.slots, np.int64)
        row_lengths = lengths[slots]
        longest = int(row_lengths.max()) + 1
        mask = None
        if int(row_lengths.min()) + 1 < longest:
            hidden = np.arange(longest) > row_lengths[:, None]
            mask = torch.zeros(hidden.shape, dtype=self.layout.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            mask = mask[:, None, None].to(self.layout.device)
        targets = []
        for heads, _ in self.layout.kinds:
            row = (np.arange(len(slots))[:, None] * heads + np.arange(heads)) * bucket.size + row_lengths[:, None]
            targets.append(self.tensor(row.reshape(-1)))
        return BucketRows(bucket, None if index is None else self.tensor(index), longest, mask, targets)

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
        kind, index = self.layout.layer_index[layer]
        by_token = [x[0].transpose(0, 1) for x in (query, key, value)]
        # The kernels assume that the numbers of one head are adjacent, whatever the strides say.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in by_token)
        for prefill in self.batch.prefills:
            for cached, new in zip(prefill.node.allocated[kind][index], (key, value), strict=True):
                cached[:, prefill.in_node] = new[prefill.in_pass].transpose(0, 1)
        parts = [self.prefill(prefill, query, key, value, scaling) for prefill in self.alone]
        parts += [self.prefill_together(runs, query, key, value, scaling) for runs in self.together]
        parts += [self.decode(rows, kind, index, query, key, value, scaling) for rows in self.buckets]
        out, lse = (torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True))
        if self.pass_order is not None:
            out, lse = out.index_select(0, self.pass_order), lse.index_select(0, self.pass_order)
        for level in self.batch.levels:
            prefix_out, prefix_lse = self.read_prefixes(level, kind, index, query, scaling)
            out = torch.lerp(out, prefix_out, torch.sigmoid(prefix_lse - lse)[..., None])
            if sinks is not None or level is not self.batch.levels[-1]:
                lse = torch.logaddexp(lse, prefix_lse)
        if sinks is not None:
            out = out * torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]
        return out.to(query.dtype).contiguous()[None]

    def prefill(
        self, prefill: Prefill, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> tuple[Tensor, Tensor]:
        """New tokens of a node, each over itself and the new tokens before it."""
        q, k, v = (x[prefill.in_pass].transpose(0, 1) for x in (query, key, value))
        return by_token_of(*attend(q[None], k[None], v[None], scaling, causal=True))

    def prefill_together(
        self, runs: PaddedRuns, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> tuple[Tensor, Tensor]:
        """The same for several nodes. No token sees padding, which comes after the tokens of its node."""
        q, k, v = (runs.pad(x) for x in (query, key, value))
        return runs.unpad(*attend(q, k, v, scaling, causal=True))

    def decode(
        self, rows: BucketRows, kind: int, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> tuple[Tensor, Tensor]:
        """One token of each row of a bucket, over the whole row."""
        if rows.index is not None:
            query, key, value = (x.index_select(0, rows.index) for x in (query, key, value))
        states = rows.bucket.states[kind][index]
        for cached, new in zip(states, (key, value), strict=True):
            cached.view(-1, cached.shape[-1]).index_copy_(0, rows.targets[kind], new.reshape(-1, cached.shape[-1]))
        keys, values = states[:, : len(query), :, : rows.longest]
        # The heads that share a key-value head become queries of it.
        queries = query.unflatten(1, (key.shape[1], -1))
        mask = None if rows.mask is None else rows.mask.expand(-1, -1, queries.shape[2], -1)
        out, lse = attend(queries, keys, values, scaling, mask=mask)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def read_prefixes(
        self, level: Sequence[PrefixRead], kind: int, index: int, query: Tensor, scaling: float | None
    ) -> tuple[Tensor, Tensor]:
        """All tokens over one node each; zeros, with a log-sum-exp of minus infinity, for tokens that read none."""
        outs, sums, done = [], [], 0
        size, heads, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)

        def skip(count: int) -> None:
            if count:
                outs.append(query.new_zeros((count, heads, width), dtype=wide))
                sums.append(query.new_full((count, heads), -torch.inf, dtype=wide))

        for read in level:
            skip(read.start - done)
            states = read.node.allocated[kind][index][:, None, :, : read.num_keys]
            queries = query[None, read.start : read.end].transpose(1, 2)
            out, lse = by_token_of(*attend(queries, states[0], states[1], scaling))
            outs.append(out)
            sums.append(lse)
            done = read.end
        skip(size - done)
        return (torch.cat(outs), torch.cat(sums)) if len(outs) > 1 else (outs[0], sums[0])


def runs_of(prefills: Sequence[Prefill], device: str) -> PaddedRuns:
    return PaddedRuns.of([(prefill.start, prefill.start + prefill.count) for prefill in prefills], device)


def by_token_of(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H, d] and [N, H] of [1, H, N, d] and [1, H, N]."""
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output [B, H, n, d], log-sum-exp of the scores [B, H, n]), in float32 or wider."""
    if query.device.type != "cpu":
        return attend_by_definition(query, key, value, scaling, causal=causal, mask=mask)
    out, lse = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
    return out.to(lse.dtype), lse


def attend_by_definition(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, *, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same without a kernel, on any device."""
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, 1) if share > 1 else x for x in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ value.float(), lse
