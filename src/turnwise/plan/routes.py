"""The routes of a plan's nodes.

A route belongs to a node of the tree of all turns, whichever layout computes it: trees, cuts and packed rows of the
same turns take the same experts. Turns may disagree on a node that they share, where other weights or another batch
computed it: the first turn that has a route for it decides. Numpy only. Letters: N nodes, L routers, k experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.plan.blocks import Index
from turnwise.routes import Routes
from turnwise.tokens import Tokens, common_prefix
from turnwise.types import Turn

NO_ROUTE = -1
"""The row of a node that no turn has a route for; the model takes its own choice."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeRoutes:
    """Which experts the nodes of a plan take.

    Example:
        NodeRoutes(table=np.array([[[3, 1]], [[0, 2]]], np.uint8), rows=np.array([0, 1, NO_ROUTE]),
                   shared=np.zeros(3, bool), disagreed=np.zeros(3, bool))
    """

    table: Routes
    """[R, L, k] distinct places; equal routes may occur again."""
    rows: Index
    """[N] which of them; NO_ROUTE where the node has none."""
    shared: NDArray[np.bool_]
    """[N] nodes for which several turns have a route."""
    disagreed: NDArray[np.bool_]
    """[N] those of them where one took other experts than the first."""


class SettledRoutes:
    """The routes of the turns of a mini-batch, settled before any layout."""

    def __init__(self, table: Routes, rows: Mapping[int, Index], counts: NDArray[np.int64], differs: NDArray[np.bool_]):
        self.table = table
        """[R, L, k] of all turns."""
        self.rows = rows
        """By turn: the row of each of its tokens."""
        self.counts = counts
        """[R] how many turns have a route for the token of each row."""
        self.differs = differs
        """[R] whether one of them took other experts."""

    def piece(self, turn: int, low: int, high: int) -> Index:
        rows = self.rows[turn][low:high]
        return np.concatenate([rows, np.full(high - low - len(rows), NO_ROUTE, np.int64)])

    def of_tokens(self, pieces: Sequence[tuple[int, int, int]]) -> NodeRoutes:
        """The routes of nodes that are, in order, tokens `low` to before `high` of some turns: (turn, low, high). Those
        beyond the end of a turn are padding and have none."""
        rows = np.concatenate([np.zeros(0, np.int64), *(self.piece(*piece) for piece in pieces)])
        known = rows != NO_ROUTE
        used, places = np.unique(rows[known], return_inverse=True)
        own = np.full(len(rows), NO_ROUTE, np.int64)
        own[known] = places
        shared, disagreed = np.zeros((2, len(rows)), bool)
        shared[known], disagreed[known] = self.counts[rows[known]] > 1, self.differs[rows[known]]
        return NodeRoutes(self.table[used], own, shared, disagreed)


def settle_routes(turns: Sequence[Turn]) -> SettledRoutes | None:
    """The routes of some turns, where each node of their tree has that of the first turn that has one; None where no
    turn has any."""
    routed = [turn for turn in turns if turn.routes is not None]
    if not routed:
        return None
    if len({(turn.routes.dtype, turn.routes.shape[1:]) for turn in routed if turn.routes is not None}) > 1:
        raise ValueError("turns have routes of models with different layers or experts; train on one model's")
    table = np.concatenate([turn.routes for turn in routed if turn.routes is not None])
    nodes, num_nodes = nodes_of(turns)
    owner = np.full(num_nodes, NO_ROUTE, np.int64)
    counts, differs = np.zeros(len(table), np.int64), np.zeros(len(table), bool)
    first = 0
    for place, turn in enumerate(turns):
        if turn.routes is None:
            continue
        count = len(turn.routes)
        end = len(turn.prompt) + len(turn.action) - 1
        own, rows = nodes[place][end - count : end], np.arange(first, first + count)
        first += count
        free = owner[own] == NO_ROUTE
        owner[own[free]] = rows[free]
        counts[owner[own]] += 1
        taken = owner[own[~free]]
        differs[taken] |= (np.sort(table[taken], -1) != np.sort(table[rows[~free]], -1)).any((1, 2))
    return SettledRoutes(table, {place: owner[of_turn] for place, of_turn in nodes.items()}, counts, differs)


def routed_by(turns: Sequence[Turn], chosen: Sequence[bool]) -> list[bool]:
    """Whether all routes on the path of each turn are those of chosen turns. A path may have routes of older weights:
    those of a turn before, or of another attempt that came first."""
    settled = settle_routes(turns)
    if settled is None:
        return [True] * len(turns)
    counts = [0 if turn.routes is None else len(turn.routes) for turn in turns]
    good = np.repeat(np.asarray(chosen, bool), counts)
    return [bool(good[rows[rows != NO_ROUTE]].all()) for _, rows in sorted(settled.rows.items())]


def route_shares(plans: Iterable[NodeRoutes | None]) -> dict[str, float]:
    """Metrics of the routes of some plans; none where none has any."""
    found = [routes for routes in plans if routes is not None]
    if not found:
        return {}
    known = sum(int((routes.rows != NO_ROUTE).sum()) for routes in found)
    shared = sum(int(routes.shared.sum()) for routes in found)
    return {
        "routes/replayed": known / sum(len(routes.rows) for routes in found),
        "routes/disagreed": sum(int(routes.disagreed.sum()) for routes in found) / shared if shared else 0.0,
    }


def nodes_of(turns: Sequence[Turn]) -> tuple[dict[int, Index], int]:
    """(by turn: the number of the node of each of its tokens, how many nodes there are). Equal prefixes have the same
    nodes."""
    sequences: dict[int, Tokens] = {
        place: np.concatenate([turn.prompt, turn.action]) for place, turn in enumerate(turns)
    }
    order = sorted(sequences, key=lambda place: sequences[place].astype(">u4").tobytes())
    nodes: dict[int, Index] = {}
    count = 0
    for before, place in zip([None, *order], order, strict=False):
        sequence = sequences[place]
        shared = 0 if before is None else common_prefix(sequences[before], sequence)
        new = len(sequence) - shared
        above = nodes[before][:shared] if before is not None else np.zeros(0, np.int64)
        nodes[place] = np.concatenate([above, np.arange(count, count + new)])
        count += new
    return nodes, count
