"""One forward pass: the prompt tokens to prefill, and one token of every request that decodes.

Tokens stand in the order of a walk through the tree of prefixes, so that all tokens that follow a node stand together
and attend to it in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from turnwise.engines.slots.radix import PrefixNode


@dataclass(frozen=True, slots=True)
class Prefill:
    """The next `count` tokens of a node, computed at indices `start` to `start + count` of the pass."""

    node: PrefixNode
    count: int
    start: int

    @property
    def in_pass(self) -> slice:
        return slice(self.start, self.start + self.count)

    @property
    def in_node(self) -> slice:
        return slice(self.node.num_cached_tokens, self.node.num_cached_tokens + self.count)


@dataclass(frozen=True, slots=True)
class PrefixRead:
    """The tokens `start` to `end` of the pass attend to the first `num_keys` tokens of a node."""

    node: PrefixNode
    num_keys: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Pass:
    """The tokens that are computed together."""

    size: int
    """Tokens."""
    prefills: tuple[Prefill, ...]
    slots: NDArray[np.int64]
    """Slots that decode, in the order of their tokens."""
    slot_index: NDArray[np.int64]
    """Index of each slot's token in the pass."""
    levels: tuple[tuple[PrefixRead, ...], ...] = field(repr=False)
    """The prefixes that tokens attend to, in addition to the pass itself and to the rows of requests. The reads of one
    level are of different tokens, in order."""


def lay_out(decoding: Mapping[PrefixNode, Sequence[int]], prefill_counts: Mapping[PrefixNode, int]) -> Pass:
    """The pass in which the slots `decoding`, by the node they follow, decode one token each and nodes prefill so many
    more tokens.

    All nodes before a slot, and before a node that is prefilled, must be cached by the end of the pass.
    """
    children, roots = subtree(chain(prefill_counts, decoding))
    prefills: list[Prefill] = []
    slots: list[int] = []
    slot_index: list[int] = []
    levels: list[list[PrefixRead]] = []
    size = 0
    # A node is visited twice: before and after all that follows it.
    stack: list[tuple[PrefixNode, int, int | None]] = [(root, -1, None) for root in reversed(roots)]
    while stack:
        node, level, after = stack.pop()
        if after is not None:
            if size > after and len(node.tokens):
                levels[level].append(PrefixRead(node, len(node.tokens), after, size))
            continue
        while len(levels) <= level:
            levels.append([])
        if count := prefill_counts.get(node, 0):
            prefills.append(Prefill(node, count, size))
            if node.num_cached_tokens:
                levels[level].append(PrefixRead(node, node.num_cached_tokens, size, size + count))
            size += count
        stack.append((node, level, size))
        node_slots = decoding.get(node, ())
        slots.extend(node_slots)
        slot_index.extend(range(size, size + len(node_slots)))
        size += len(node_slots)
        stack.extend((child, level + 1, None) for child in reversed(children[node]))
    return Pass(
        size,
        tuple(prefills),
        np.array(slots, np.int64),
        np.array(slot_index, np.int64),
        tuple(tuple(level) for level in levels if level),
    )


def subtree(nodes: Iterator[PrefixNode]) -> tuple[dict[PrefixNode, list[PrefixNode]], list[PrefixNode]]:
    """(children by node, roots) of the smallest trees that hold these nodes."""
    children: dict[PrefixNode, list[PrefixNode]] = {}
    roots = []
    for last in nodes:
        node, child = last, None
        while True:
            was_visited = node in children
            siblings = children.setdefault(node, [])
            if child is not None:
                siblings.append(child)
            if was_visited:
                break
            if node.parent is None:
                roots.append(node)
                break
            node, child = node.parent, node
    return children, roots
