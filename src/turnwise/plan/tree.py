"""The prefix tree of turns: every token that several turns share is laid out once.

Turns are sorted, neighbours compared, and each turn adds to the tree only what follows the prefix it shares with the
turn before it: one segment of new tokens. Python loops over turns, never over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.plan.blocks import Index
from turnwise.plan.plan import Plan
from turnwise.plan.routes import SettledRoutes, settle_routes
from turnwise.plan.target_sets import TargetSets
from turnwise.tokens import Tokens, common_prefix
from turnwise.types import Turn


@dataclass(frozen=True, slots=True)
class Row:
    """A turn's place in a depth-first order: which it is, and how many tokens it shares with the row before it."""

    turn: int
    shared: int


def sequence_of(turn: Turn) -> Tokens:
    """Prompt and action, end to end."""
    return np.concatenate([turn.prompt, turn.action])


def sort_rows(turns: Sequence[Turn], chosen: Sequence[int]) -> tuple[list[Row], dict[int, Tokens]]:
    """(the chosen turns sorted by their tokens, the tokens of each): equal prefixes stand together."""
    sequences = {turn: sequence_of(turns[turn]) for turn in chosen}
    # Big-endian bytes compare as the tokens do.
    order = sorted(chosen, key=lambda turn: sequences[turn].astype(">u4").tobytes())
    rows, before = [], None
    for turn in order:
        rows.append(Row(turn, common_prefix(before, sequences[turn]) if before is not None else 0))
        before = sequences[turn]
    return rows, sequences


def tree(turns: Sequence[Turn]) -> Plan:
    """One plan of all turns that have an action, in which shared prefixes are laid out once."""
    rows, sequences = sort_rows(turns, [place for place, turn in enumerate(turns) if len(turn.action)])
    return grow(turns, heavy_first(rows, sequences), sequences, routes=settle_routes(turns))


# ---------------------------------------------------------------- order


@dataclass(slots=True)
class Branch:
    """A node with children, while rows are put in order: everything that shares its first `depth` tokens."""

    depth: int
    children: list[tuple[int, list[Row]]]
    """(tokens below the branch, rows) of each."""


def heavy_first(rows: Sequence[Row], sequences: dict[int, Tokens]) -> list[Row]:
    """The sorted rows in a depth-first order that goes into the largest subtree first, at every branch. What the first
    shares with a row before it is left out.

    The largest then continues the chain of its parent, so that a token is in few chains' ways: every step off a chain
    at least halves what is below.
    """
    stack = [Branch(0, [])]
    for place, row in enumerate(rows):
        following = rows[place + 1].shared if place + 1 < len(rows) else 0
        length = len(sequences[row.turn])
        size, ordered, depth = 0, [row], length
        while stack[-1].depth > following:
            branch = stack.pop()
            branch.children.append((size + depth - branch.depth, ordered))
            size, ordered = settle(branch)
            depth = branch.depth
        if stack[-1].depth < following:
            stack.append(Branch(following, []))
        stack[-1].children.append((size + depth - stack[-1].depth, ordered))
    return [Row(row.turn, row.shared if place else 0) for place, row in enumerate(settle(stack[0])[1])]


def settle(branch: Branch) -> tuple[int, list[Row]]:
    """(tokens below a branch, its rows with the largest child's first)."""
    children = sorted(branch.children, key=lambda child: -child[0])
    ordered = list(children[0][1]) if children else []
    for _, rows in children[1:]:
        ordered.append(Row(rows[0].turn, branch.depth))
        ordered.extend(rows[1:])
    return sum(size for size, _ in children), ordered


# ---------------------------------------------------------------- layout


@dataclass(slots=True)
class Segment:
    """The stretch of new tokens that a row has added, while later rows may still share its beginning."""

    start: int
    """Node of its first token."""
    low: int
    """Depth of its first token."""
    high: int
    """Depth up to which the next row shares it."""


def grow(
    turns: Sequence[Turn],
    rows: Sequence[Row],
    sequences: dict[int, Tokens],
    tokens_per_pass: int = 0,
    routes: SettledRoutes | None = None,
) -> Plan:
    """The plan of rows in a depth-first order, in stretches of at most `tokens_per_pass` tokens where that is given."""
    shared = np.array([row.shared for row in rows], np.int64)
    lengths = np.array([len(sequences[row.turn]) for row in rows], np.int64)
    new = lengths - shared
    ends = np.cumsum(new)
    starts = ends - new
    num_tokens = int(new.sum())
    depth = np.arange(num_tokens) - np.repeat(starts - shared, new)
    parent = np.arange(-1, num_tokens - 1)
    exits = np.full(num_tokens, num_tokens, np.int64)
    nodes: list[Index] = []
    path: list[Segment] = []
    for row, start, length in zip(rows, starts.tolist(), lengths.tolist(), strict=True):
        leave(path, row.shared, start, exits)
        if length > row.shared:
            parent[start] = path[-1].start + row.shared - path[-1].low - 1 if path else -1
            path.append(Segment(start, row.shared, length))
        nodes.append(nodes_between(path, len(turns[row.turn].prompt), length))
    offsets = np.concatenate(([0], np.cumsum([len(of_turn) for of_turn in nodes], dtype=np.int64)))
    return Plan(
        tokens=np.concatenate([np.zeros(0, np.int32), *(sequences[row.turn][row.shared :] for row in rows)]),
        depth=depth.astype(np.int32),
        parent=parent.astype(np.int32),
        exit=exits.astype(np.int32),
        turns=np.array([row.turn for row in rows], np.int64),
        offsets=offsets.astype(np.int64),
        action_nodes=np.concatenate([np.zeros(0, np.int64), *nodes]),
        num_stretches=max(1, -(-num_tokens // tokens_per_pass)) if tokens_per_pass else 1,
        allowed=TargetSets.of(turns, [row.turn for row in rows]),
        routes=None
        if routes is None
        else routes.of_tokens([(row.turn, row.shared, len(sequences[row.turn])) for row in rows]),
    )


def leave(path: list[Segment], depth: int, node: int, exits: Index) -> None:
    """Go back up the path to a depth: the subtrees of all tokens that are left end before `node`."""
    while path and path[-1].high > depth:
        segment = path[-1]
        low = max(segment.low, depth)
        exits[segment.start + low - segment.low : segment.start + segment.high - segment.low] = node
        segment.high = low
        if segment.high > segment.low:
            return
        path.pop()


def nodes_between(path: Sequence[Segment], low: int, high: int) -> Index:
    """The nodes of a path from one depth to another."""
    parts: list[Index] = []
    for segment in reversed(path):
        first, last = max(low, segment.low), min(high, segment.high)
        if first < last:
            parts.append(np.arange(segment.start + first - segment.low, segment.start + last - segment.low))
        if segment.low <= low:
            break
    return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int64)
