"""Runs of tokens of like length, computed in one padded call instead of one call each.

At a kernel call of some 15 microseconds, many short prompts with nothing in common cost more in calls than in
arithmetic: those of an evaluation, for instance.

Letters: N tokens of the pass, B runs, n tokens of the longest run, M tokens of all runs, H heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Item = TypeVar("Item")

LONGEST = 256
"""Longer runs are computed alone: a call costs little beside them."""
FEWEST = 3
"""So few runs are computed alone too: padding has kernel calls of its own."""
MOST_PADDING, SPARE = 1.25, 4
"""The longest run of a batch has at most so many times the tokens of the shortest, and a few more."""


def grouped(items: Iterable[Item], size_of: Callable[[Item], int]) -> tuple[list[list[Item]], list[Item]]:
    """(groups of items of like size, items that stay alone)."""
    alone, groups = [], list[list[Item]]()
    for item in sorted(items, key=size_of):
        if size_of(item) > LONGEST:
            alone.append(item)
        elif groups and size_of(item) <= MOST_PADDING * size_of(groups[-1][0]) + SPARE:
            groups[-1].append(item)
        else:
            groups.append([item])
    alone += [item for group in groups if len(group) < FEWEST for item in group]
    return [group for group in groups if len(group) >= FEWEST], alone


@dataclass(frozen=True, slots=True)
class PaddedRuns:
    """Runs of tokens of a pass side by side; a short one is filled up with copies of its first token."""

    num_runs: int
    gather: Tensor
    """[B n] the index in the pass of every place"""
    kept: Tensor | None
    """[M] the places that are not padding; None where none is"""
    index: NDArray[np.int64]
    """[M] the index in the pass of the tokens of all runs, in the order in which results come back"""

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], device: str) -> PaddedRuns:
        """Runs from a first index to a last one, excluded."""
        starts, ends = np.array(runs, np.int64).T
        places = np.arange((ends - starts).max())
        is_kept = places < (ends - starts)[:, None]
        gather = np.where(is_kept, starts[:, None] + places, starts[:, None]).reshape(-1)
        kept = None if is_kept.all() else torch.from_numpy(np.flatnonzero(is_kept)).to(device)
        return cls(len(runs), torch.from_numpy(gather).to(device), kept, gather[is_kept.reshape(-1)])

    def pad(self, states: Tensor) -> Tensor:
        """[B, H, n, d] of [N, H, d]."""
        runs: Tensor = states.index_select(0, self.gather).unflatten(0, (self.num_runs, -1))
        return runs.transpose(1, 2)

    def unpad(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """[M, H, d] and [M, H] of [B, H, n, d] and [B, H, n]."""
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        return (out, lse) if self.kept is None else (out.index_select(0, self.kept), lse.index_select(0, self.kept))
