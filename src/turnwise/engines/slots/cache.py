"""Attention of a pass over cached keys and values: flash kernels on what lies together, merged by log-sum-exp.

Letters: N tokens of the pass, H heads, G key-value heads, d head size, R rows of a shelf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.engines.slots.kv_layout import Shapes
from turnwise.engines.slots.passes import Fill, Look, Pass
from turnwise.engines.slots.row_cache import Shelf, Shelves

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a shelf in a pass: each writes one token and attends to all it has."""

    shelf: Shelf
    places: Tensor | None
    """[R] where their tokens stand; none where they are all there is, in this order"""
    longest: int
    """Tokens of the longest row, the new one included."""
    mask: Tensor | None
    """[R, 1, 1, longest] to be added; none where all rows are as long"""
    targets: list[Tensor]
    """[R G] per kind of layer: where new keys go, and values too, in those of a layer laid out flat"""


class PassAttention:
    """The `attend` of one pass: writes the new keys and values, then attends to them and to all before them."""

    def __init__(self, shapes: Shapes, which: Pass, shelves: Shelves, lengths: NDArray[np.int64]) -> None:
        """`lengths` by slot: tokens that a slot's row holds already."""
        self.shapes = shapes
        self.which = which
        place = dict(zip(which.slots.tolist(), which.places.tolist(), strict=True))
        rows = [np.array([place[slot] for slot in shelf.slots], np.int64) for shelf in shelves.shelves.values()]
        order = [np.arange(fill.place, fill.place + fill.count) for fill in which.fills]
        found = np.concatenate([*order, *rows])
        in_order = bool((found[:-1] < found[1:]).all())
        self.rows = [
            self.rows_of(shelf, None if in_order and len(own) == which.size else own, lengths)
            for shelf, own in zip(shelves.shelves.values(), rows, strict=True)
        ]
        back = np.empty(len(found), np.int64)
        back[found] = np.arange(len(found))
        self.back = None if in_order else self.tensor(back)

    def tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.shapes.device)

    def rows_of(self, shelf: Shelf, places: NDArray[np.int64] | None, lengths: NDArray[np.int64]) -> Rows:
        slots = np.array(shelf.slots, np.int64)
        own = lengths[slots]
        longest = int(own.max()) + 1
        mask = None
        if int(own.min()) + 1 < longest:
            hidden = np.arange(longest) > own[:, None]
            mask = torch.zeros(hidden.shape, dtype=self.shapes.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            mask = mask[:, None, None].to(self.shapes.device)
        targets = []
        for heads, _ in self.shapes.kinds:
            row = (np.arange(len(slots))[:, None] * heads + np.arange(heads)) * shelf.size + own[:, None]
            targets.append(self.tensor(row.reshape(-1)))
        return Rows(shelf, None if places is None else self.tensor(places), longest, mask, targets)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        kind, index = self.shapes.place[layer]
        by_token = [x[0].transpose(0, 1) for x in (query, key, value)]
        # The kernels take the numbers of one head to stand side by side, whatever the strides say.
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in by_token)
        parts = [self.fill_in(fill, kind, index, query, key, value, scaling) for fill in self.which.fills]
        parts += [self.extend(rows, kind, index, query, key, value, scaling) for rows in self.rows]
        out, lse = (torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True))
        if self.back is not None:
            out, lse = out.index_select(0, self.back), lse.index_select(0, self.back)
        for level in self.which.levels:
            more, more_lse = self.look(level, kind, index, query, scaling)
            out = torch.lerp(out, more, torch.sigmoid(more_lse - lse)[..., None])
            if level is not self.which.levels[-1]:
                lse = torch.logaddexp(lse, more_lse)
        return out.to(query.dtype).contiguous()[None]

    def fill_in(
        self, fill: Fill, kind: int, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> tuple[Tensor, Tensor]:
        """New tokens of a node, each among those of them that come before it."""
        here = slice(fill.place, fill.place + fill.count)
        there = slice(fill.node.filled, fill.node.filled + fill.count)
        q, k, v = (x[here].transpose(0, 1) for x in (query, key, value))
        states = fill.node.held[kind][index]
        states[0, :, there] = k
        states[1, :, there] = v
        return by_token_of(*attend(q[None], k[None], v[None], scaling, causal=True))

    def extend(
        self, rows: Rows, kind: int, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> tuple[Tensor, Tensor]:
        """One token of each row of a shelf, over all that the row has."""
        if rows.places is not None:
            query, key, value = (x.index_select(0, rows.places) for x in (query, key, value))
        states = rows.shelf.states[kind][index]
        for own, new in zip(states, (key, value), strict=True):
            own.view(-1, own.shape[-1]).index_copy_(0, rows.targets[kind], new.reshape(-1, own.shape[-1]))
        keys, values = states[:, : len(query), :, : rows.longest]
        # The heads that share a key-value head become queries of it.
        queries = query.unflatten(1, (key.shape[1], -1))
        mask = None if rows.mask is None else rows.mask.expand(-1, -1, queries.shape[2], -1)
        out, lse = attend(queries, keys, values, scaling, mask=mask)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def look(
        self, level: Sequence[Look], kind: int, index: int, query: Tensor, scaling: float | None
    ) -> tuple[Tensor, Tensor]:
        """All tokens over one node each; nothing, with a log-sum-exp of minus infinity, where there is none."""
        outs, sums, place = [], [], 0
        size, heads, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)

        def skip(count: int) -> None:
            if count:
                outs.append(query.new_zeros((count, heads, width), dtype=wide))
                sums.append(query.new_full((count, heads), -torch.inf, dtype=wide))

        for look in level:
            skip(look.start - place)
            states = look.node.held[kind][index][:, None, :, : look.keys]
            queries = query[None, look.start : look.end].transpose(1, 2)
            out, lse = by_token_of(*attend(queries, states[0], states[1], scaling))
            outs.append(out)
            sums.append(lse)
            place = look.end
        skip(size - place)
        return (torch.cat(outs), torch.cat(sums)) if len(outs) > 1 else (outs[0], sums[0])


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
        return attend_plainly(query, key, value, scaling, causal=causal, mask=mask)
    out, lse = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
    return out.to(lse.dtype), lse


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, *, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same by definition, on any device."""
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
