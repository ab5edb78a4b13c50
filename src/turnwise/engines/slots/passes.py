"""One forward pass: the tokens of prompts that are filled in, and one token of every request that samples.

Tokens stand in the order of a walk through the tree of prefixes, so that all that follow a node stand together, and
attend to it in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.slots.radix import Node


@dataclass(frozen=True, slots=True)
class Fill:
    """Tokens of a node that are computed, at a place of the pass; they follow those that were computed before."""

    node: Node
    count: int
    place: int


@dataclass(frozen=True, slots=True)
class Look:
    """Tokens of the pass, `start` to `end`, that attend to the first `keys` tokens of a node."""

    node: Node
    keys: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pass:
    """What is computed together."""

    size: int
    """Tokens."""
    fills: tuple[Fill, ...]
    slots: NDArray[np.int64]
    """Requests that sample, in the order of their tokens."""
    places: NDArray[np.int64]
    """Where their tokens stand."""
    levels: tuple[tuple[Look, ...], ...] = field(repr=False)
    """What is attended to beside the pass itself and what requests have of their own. The looks of a level are of
    different tokens, in order."""


def lay_out(rows: Mapping[Node, Sequence[int]], counts: Mapping[Node, int]) -> Pass:
    """The pass in which `rows`, slots by the node they follow, sample and `counts` more tokens of nodes are filled in.

    All that comes before a row, and before a node that is filled in, must be full by the end of the pass.
    """
    below, tops = in_play(chain(counts, rows))
    fills: list[Fill] = []
    slots: list[int] = []
    places: list[int] = []
    levels: list[list[Look]] = []
    size = 0
    # A node is met twice: before and after all that follows it.
    stack: list[tuple[Node, int, int | None]] = [(top, -1, None) for top in reversed(tops)]
    while stack:
        node, level, after = stack.pop()
        if after is not None:
            if size > after and len(node.tokens):
                levels[level].append(Look(node, len(node.tokens), after, size))
            continue
        while len(levels) <= level:
            levels.append([])
        if count := counts.get(node, 0):
            fills.append(Fill(node, count, size))
            if node.filled:
                levels[level].append(Look(node, node.filled, size, size + count))
            size += count
        stack.append((node, level, size))
        own = rows.get(node, ())
        slots.extend(own)
        places.extend(range(size, size + len(own)))
        size += len(own)
        stack.extend((child, level + 1, None) for child in reversed(below[node]))
    return Pass(
        size,
        tuple(fills),
        np.array(slots, np.int64),
        np.array(places, np.int64),
        tuple(tuple(level) for level in levels if level),
    )


def in_play(nodes: Iterator[Node]) -> tuple[dict[Node, list[Node]], list[Node]]:
    """(the children of nodes on the paths to these, where the paths begin)."""
    below: dict[Node, list[Node]] = {}
    tops = []
    for first in nodes:
        node, child = first, None
        while True:
            known = node in below
            children = below.setdefault(node, [])
            if child is not None:
                children.append(child)
            if known:
                break
            if node.parent is None:
                tops.append(node)
                break
            node, child = node.parent, node
    return below, tops
