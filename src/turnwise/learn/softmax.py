"""The softmax of a vocabulary that is seen part by part: by tiles of one process, by the processes that share it.

What is kept of the logits seen so far is enough for logprobs and entropies: the highest of them, and two sums relative
to it. Parts are put together as flash attention does it, whatever their order.

Letters: K places, V vocabulary, n places of a tile, w tokens of a tile.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

NEVER = -1e30
"""The logit of a token that is not allowed: its probability is exactly 0, and unlike infinity it may be multiplied by
that."""


class VocabularyShard(NamedTuple):
    """The rows of the output layer that this process has, where the other processes of a group have the rest.

    The hidden states are the same on all of them, and so are the results. The gradient of the hidden states is summed
    over the group, because each process knows that of its own tokens only.
    """

    group: Any
    """The process group."""
    first: int
    """The token of the first row here."""
    size: int
    """Tokens of all processes."""

    def sum(self, values: Tensor) -> Tensor:
        """Values added up over the group, in place."""
        dist.all_reduce(values, dist.ReduceOp.SUM, group=self.group)
        return values

    def highest(self, values: Tensor) -> Tensor:
        """The highest values of the group."""
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """[n, w of all processes] of [n, w], with the same w everywhere."""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, 1)


class Tally:
    """What is known of the softmax of each of K places, from the logits that were added."""

    def __init__(self, places: int, like: Tensor, dtype: torch.dtype) -> None:
        self.highest = like.new_full((places,), NEVER, dtype=dtype)
        """The highest logit."""
        self.total = like.new_zeros(places, dtype=dtype)
        """Sum of exp(logit - highest)."""
        self.leaning = torch.zeros_like(self.total)
        """Sum of exp(logit - highest) (logit - highest)."""

    def add(self, rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Take in logits [n, w] of some places, which are used up. Returns (exp(logit - highest of the tile), that
        highest [n])."""
        highest = logits.amax(-1)
        chances = logits.sub_(highest[:, None]).exp()
        total = chances.sum(-1)
        leaning = logits.mul_(chances).sum(-1)
        both = torch.maximum(self.highest[rows], highest)
        before = rescaled(self.highest[rows] - both, self.total[rows], self.leaning[rows])
        added = rescaled(highest - both, total, leaning)
        self.highest[rows], self.total[rows], self.leaning[rows] = both, before[0] + added[0], before[1] + added[1]
        return chances, highest

    def join(self, shard: VocabularyShard) -> None:
        """Take in what all processes know."""
        highest = shard.highest(self.highest)
        self.total, self.leaning = shard.sum(torch.stack(rescaled(self.highest - highest, self.total, self.leaning)))
        self.highest = highest

    @property
    def normalisers(self) -> Tensor:
        """[K] log-sum-exp of the logits."""
        return self.highest + self.total.log()

    @property
    def entropies(self) -> Tensor:
        """[K] log(total) - leaning / total: no difference of large numbers, however large logits are."""
        return self.total.log() - self.leaning / self.total

    def logprobs(self, logits: Tensor) -> Tensor:
        """[K, ...] of logits of any tokens."""
        shape = (-1, *[1] * (logits.dim() - 1))
        return logits - self.highest.view(shape) - self.total.log().view(shape)


def rescaled(step: Tensor, total: Tensor, leaning: Tensor) -> tuple[Tensor, Tensor]:
    """Both sums relative to a highest logit that is higher by -step."""
    scale = step.exp()
    return scale * total, scale * (leaning + step * total)


def log_sum(shard: VocabularyShard, values: Tensor) -> Tensor:
    """Log-sum-exp over a group; -inf where all have that."""
    highest = shard.highest(values).clamp_(min=NEVER)
    return shard.sum((values - highest).exp_()).log_() + highest


class Picks(NamedTuple):
    """Tokens that are looked for in a tile: where they are, and which are in it at all."""

    places: Tensor
    """[n, k] columns; any where the token is in another tile."""
    inside: Tensor
    """[n, k] whether it is in this tile."""

    @classmethod
    def of(cls, tokens: Tensor, first: int, width: int) -> Picks:
        """Of tokens [n, k] in a tile of `width` tokens from `first` on."""
        places = tokens - first
        inside = (places >= 0) & (places < width)
        return cls(places.clamp(0, width - 1), inside)

    def take(self, table: Tensor) -> Tensor:
        """[n, k] of [n, w], 0 for tokens that are not in it."""
        return table.gather(1, self.places).masked_fill(~self.inside, 0.0)

    def put(self, table: Tensor, values: Tensor) -> Tensor:
        """[n, w] with values [n, k] in the tokens' columns, in place."""
        kept = torch.where(self.inside, values, 0.0)
        return table.masked_fill_(self.marked(table), 0.0).scatter_add_(1, self.places, kept)

    def add(self, table: Tensor, values: Tensor) -> Tensor:
        """[n, w] with values [n, k] added to the tokens' columns, in place."""
        return table.scatter_add_(1, self.places, values.masked_fill(~self.inside, 0.0))

    def marked(self, table: Tensor) -> Tensor:
        """[n, w] whether a column is one of the tokens."""
        marks = torch.zeros_like(table, dtype=torch.int8).scatter_add_(1, self.places, self.inside.to(torch.int8))
        return marks > 0

    def rest(self, table: Tensor) -> Tensor:
        """[n] log-sum-exp of all other columns; -inf where there are none."""
        return table.masked_fill(self.marked(table), -math.inf).logsumexp(1)
