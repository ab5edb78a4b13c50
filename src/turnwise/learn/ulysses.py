"""Ulysses: context parallelism. The nodes of a pass are spread over the ranks of a group (arXiv 2309.14509).

Each rank computes embeddings, projections, norms, experts and the output layer for its own run of nodes. Only attention
sees other nodes: before it, an all-to-all gives each rank all nodes of some heads, and after it another brings the
outputs back to the ranks of their nodes. So attention itself, its tree mask and what it hands from stretch to stretch
are those of one process.

Every term of the loss belongs to one node, and a rank computes those of the nodes whose parent it has. The sum of the
ranks' gradients is the gradient of all terms, because the exchange carries gradients back to where states came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from turnwise.learn.attention import Attend
from turnwise.plan.plan import Plan, Stretch

T = TypeVar("T")


class Context(Protocol):
    """Who computes the nodes of a pass."""

    def part(self, plan: Plan, stretch: Stretch) -> Stretch:
        """The nodes of a stretch that this process computes, and the action tokens that it predicts."""
        ...

    def attention(self, attend: Attend, stretch: Stretch) -> Attend:
        """Attention of the nodes of this process, given that of the whole stretch."""
        ...

    def gathered(self, results: list[list[T]]) -> list[list[T]]:
        """The results of all parts, given those of this process, plan by plan."""
        ...


class Alone:
    """One process computes every node."""

    def part(self, plan: Plan, stretch: Stretch) -> Stretch:
        return stretch

    def attention(self, attend: Attend, stretch: Stretch) -> Attend:
        return attend

    def gathered(self, results: list[list[T]]) -> list[list[T]]:
        return results


class Ulysses:
    """The ranks of a group share every pass. All of them get the same plans, and make their passes together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, plan: Plan, stretch: Stretch) -> Stretch:
        """A rank that is left without nodes, in a stretch of fewer nodes than ranks, computes one that another has, for
        nothing: not every model takes an empty row."""
        edges = self.edges(stretch)
        start, end = edges[self.rank], edges[self.rank + 1]
        if start < end:
            return plan.part(start, end)
        spare = min(start, stretch.end - 1)
        return plan.idle_part(spare, spare + 1)

    def attention(self, attend: Attend, stretch: Stretch) -> Attend:
        return SharedAttention(attend, np.diff(self.edges(stretch)).tolist(), self.rank, self.group)

    def gathered(self, results: list[list[T]]) -> list[list[T]]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, results, self.group)
        return [[result for part in parts for result in part] for parts in zip(*found, strict=True)]

    def edges(self, stretch: Stretch) -> list[int]:
        """[ranks + 1] where the parts of a stretch begin and end."""
        edges: list[int] = np.linspace(stretch.start, stretch.end, self.size + 1).astype(np.int64).tolist()
        return edges


class SharedAttention:
    """Attention of a rank's own nodes, computed for all nodes and the rank's own heads."""

    def __init__(self, attend: Attend, counts: Sequence[int], rank: int, group: dist.ProcessGroup) -> None:
        self.attend = attend
        self.takes_any_width = getattr(attend, "takes_any_width", False)
        self.counts = list(counts)
        """[ranks] nodes of each."""
        self.rank = rank
        self.group = group

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
        count, computed = self.counts[self.rank], query.shape[2]
        heads = heads_of(query.shape[1], key.shape[1], len(self.counts))
        mine = heads[self.rank]
        query, key, value = (states[0, :, :count] for states in (query, key, value))
        query, key, value = self.to_heads(query, key, value, heads)
        if not mine.is_regular:
            place = torch.tensor(mine.places, device=key.device)
            key, value = key.index_select(0, place), value.index_select(0, place)
        more: dict[str, Any] = {"sinks": None if sinks is None else sinks[mine.start : mine.end], "window": window}
        more = {name: given for name, given in more.items() if given is not None}
        out = self.attend(layer, query[None], key[None], value[None], scaling, **more)
        own = self.to_nodes(out[0], heads)
        return F.pad(own, (0, 0, 0, 0, 0, computed - count))[None]

    def to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, heads: Sequence[Heads]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[own heads, all nodes, width] of each [all heads, own nodes, width], in one exchange."""
        given = (query.split([share.count for share in heads]), *(parts(states, heads) for states in (key, value)))
        sent = [torch.cat([states.reshape(-1) for states in of_rank]) for of_rank in zip(*given, strict=True)]
        mine = heads[self.rank]
        rows = [(mine.count, query.shape[2]), (mine.num_keys, key.shape[2]), (mine.num_keys, value.shape[2])]
        per_node = sum(number * width for number, width in rows)
        received = self.exchange(sent, [per_node * count for count in self.counts])
        arrived = []
        for buffer, count in zip(received, self.counts, strict=True):
            pieces = buffer.split([number * count * width for number, width in rows])
            shapes = [(number, count, width) for number, width in rows]
            arrived.append([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        query, key, value = (torch.cat(states, 1) for states in zip(*arrived, strict=True))
        return query, key, value

    def to_nodes(self, out: Tensor, heads: Sequence[Heads]) -> Tensor:
        """[own nodes, all heads, width] of [all nodes, own heads, width]."""
        count, width = self.counts[self.rank], out.shape[2]
        sent = [states.reshape(-1) for states in out.split(self.counts)]
        received = self.exchange(sent, [count * share.count * width for share in heads])
        return torch.cat(
            [buffer.view(count, share.count, width) for buffer, share in zip(received, heads, strict=True)], 1
        )

    def exchange(self, sent: Sequence[Tensor], received: Sequence[int]) -> tuple[Tensor, ...]:
        """A buffer from each rank, given one for each and how long those that arrive are."""
        sizes = [len(buffer) for buffer in sent]
        arrived: Tensor = Exchange.apply(torch.cat(list(sent)), sizes, list(received), self.group)  # type: ignore[no-untyped-call]
        return tuple(arrived.split(list(received)))


class Exchange(torch.autograd.Function):
    """(buffers for all ranks, their sizes, the sizes of what arrives, group) -> what arrives."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, sizes: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.received, ctx.group = sizes, received, group
        return exchanged(sent, sizes, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(grads[0].contiguous(), ctx.received, ctx.sizes, ctx.group), None, None, None


def exchanged(sent: Tensor, sizes: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = sent.new_empty(sum(received))
    dist.all_to_all_single(arrived, sent, received, sizes, group)
    return arrived


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a rank: consecutive queries, and the keys that these use.

    Example: the first of 2 ranks, with 8 queries and 4 keys in all:
        Heads(start=0, end=4, first_key=0, end_key=2, per_key=2)
    """

    start: int
    end: int
    first_key: int
    end_key: int
    per_key: int
    """Queries that use one key, over all ranks."""

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        return self.end_key - self.first_key

    @property
    def places(self) -> list[int]:
        """Which of its keys each of its queries uses."""
        return [head // self.per_key - self.first_key for head in range(self.start, self.end)]

    @property
    def is_regular(self) -> bool:
        """Whether all its keys have equally many queries of it, as attention with fewer keys than queries expects."""
        each = self.count // self.num_keys
        return self.places == [place // each for place in range(self.count)] and each * self.num_keys == self.count


@cache
def heads_of(num_queries: int, num_keys: int, ranks: int) -> tuple[Heads, ...]:
    """The heads of every rank, about equally many. A key that several ranks use goes to each of them."""
    if num_queries < ranks:
        raise ValueError(
            f"cluster.cp = {ranks} is more than the {num_queries} attention heads of a rank of this model; "
            f"set cluster.cp to {num_queries} or less"
        )
    per_key = num_queries // num_keys
    edges = [num_queries * rank // ranks for rank in range(ranks + 1)]
    return tuple(
        Heads(start, end, start // per_key, (end - 1) // per_key + 1, per_key) for start, end in pairwise(edges)
    )


def parts(states: Tensor, heads: Sequence[Heads]) -> tuple[Tensor, ...]:
    """The keys of every rank, of [all keys, nodes, width]. Where ranks share some, their gradients are added up."""
    order = [key for share in heads for key in range(share.first_key, share.end_key)]
    if len(order) > len(states):
        states = states.index_select(0, torch.tensor(order, device=states.device))
    return tuple(states.split([share.num_keys for share in heads]))
