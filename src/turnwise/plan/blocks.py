"""Blocks: attention over a plan as causal squares and full rectangles of consecutive nodes, without a mask.

A chain is a run of nodes each of which is the child of the one before: a causal square. Everything that branches off a
chain at one of its nodes stands together in depth-first order, and sees the chain up to that node: one full rectangle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]
Nodes = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Square:
    """`count` chains of equal length, one after another, each of which sees itself causally."""

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Queries that all see the same run of keys."""

    start: int
    end: int
    first_key: int
    end_key: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """All pairs of query and key of a stretch of nodes, each once. Every query is in exactly one square.

    Example: turns 7 8 | 5 and 7 8 | 9 as a tree 7 8 5 9:
        squares (0, 3, 1) and (3, 1, 1), one rectangle (3, 4, 0, 2): query 3 with keys 0 and 1
    """

    squares: tuple[Square, ...]
    rectangles: tuple[Rectangle, ...]

    @property
    def num_pairs(self) -> int:
        of_squares = sum(s.count * s.length * (s.length + 1) // 2 for s in self.squares)
        return of_squares + sum((r.end - r.start) * (r.end_key - r.first_key) for r in self.rectangles)


def blocks_of(parent: Nodes, exits: Nodes, start: int, end: int) -> Blocks:
    """The blocks of queries from `start` to `end`, given every node's parent and the end of its subtree; keys may stand
    before `start`."""
    size = len(parent)
    chains = np.flatnonzero((parent != np.arange(-1, size - 1)) | (parent < 0))
    ends = np.append(chains[1:], size)
    rectangles = branches(parent, exits, chains)
    if start > 0 or end < size:
        rectangles = np.concatenate([rectangles, carried(chains, ends, start)])
        rectangles[:, 0] = rectangles[:, 0].clip(start, end)
        rectangles[:, 1] = rectangles[:, 1].clip(start, end)
        rectangles = rectangles[rectangles[:, 0] < rectangles[:, 1]]
        chains, ends = chains.clip(start, end), ends.clip(start, end)
        chains, ends = chains[chains < ends], ends[chains < ends]
    return Blocks(tuple(squares_of(chains, ends - chains)), tuple(Rectangle(*row) for row in rectangles.tolist()))


def branches(parent: Nodes, exits: Nodes, chains: Index) -> Index:
    """[branches, 4]: queries and keys of everything that leaves a chain at the same node."""
    parents = parent[chains].astype(np.int64)
    starts, parents = chains[parents >= 0], parents[parents >= 0]
    nodes, firsts = np.unique(parents, return_index=True)  # the first chain of a branch node comes first
    heads = chains[np.searchsorted(chains, nodes, side="right") - 1]
    return np.stack([starts[firsts], exits[nodes].astype(np.int64), heads, nodes + 1], axis=1).reshape(-1, 4)


def carried(chains: Index, ends: Index, start: int) -> Index:
    """[0 or 1, 4]: the rest of the chain that goes on over `start`, against its own beginning."""
    over = (chains < start) & (start < ends)
    found = [[start, end, head, start] for head, end in zip(chains[over], ends[over], strict=True)]
    return np.array(found, np.int64).reshape(-1, 4)


def within_window(blocks: Blocks, depth: Nodes, window: int) -> Blocks:
    """The blocks of layers in which a token sees the last `window` tokens up to itself only: all pairs of a square are
    within the window, and every query of a rectangle has a key within it, but not all of its pairs are.

    A chain longer than the window becomes pieces of its length, each of which also sees the end of the one before.
    """
    squares: list[Square] = []
    rectangles: list[Rectangle] = []
    for square in blocks.squares:
        if square.length <= window:
            squares.append(square)
            continue
        for first in range(square.start, square.end, square.length):
            last = first + square.length
            starts = np.arange(first, last, window)
            squares += squares_of(starts, np.diff(np.append(starts, last)))
            later = starts[1:].tolist() if window > 1 else []
            rectangles += [Rectangle(at, min(at + window - 1, last), at - window + 1, at) for at in later]
    for block in blocks.rectangles:
        rectangles += visible_parts(block, depth, window)
    return Blocks(tuple(squares), tuple(rectangles))


def visible_parts(block: Rectangle, depth: Nodes, window: int) -> Iterator[Rectangle]:
    """The runs of a rectangle's queries that see any of its keys through a window, each with those keys."""
    nearest = int(depth[block.end_key - 1])
    sees = depth[block.start : block.end] - nearest < window
    edges = np.flatnonzero(np.diff(np.concatenate(([False], sees, [False])).astype(np.int8)))
    for run, end in (edges.reshape(-1, 2) + block.start).tolist():
        for start in range(run, end, longest := max(window, 256)):
            stop = min(start + longest, end)
            hidden = int(depth[start:stop].min()) - window + 1 - int(depth[block.first_key])
            yield Rectangle(start, stop, block.first_key + max(0, hidden), block.end_key)


def squares_of(starts: Index, lengths: Index) -> list[Square]:
    """Chains as squares, neighbours of equal length together."""
    if len(starts) == 0:
        return []
    firsts = np.concatenate(([0], np.flatnonzero(np.diff(lengths)) + 1))
    counts = np.diff(np.append(firsts, len(lengths)))
    return [
        Square(int(starts[first]), int(lengths[first]), int(count)) for first, count in zip(firsts, counts, strict=True)
    ]
