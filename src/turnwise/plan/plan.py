"""The plan: how turns are laid out for the model. Numpy only; knows nothing of credit, losses or devices.

Letters: N tokens of the plan, U turns, K action tokens of all its turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.plan.blocks import Blocks, Index, blocks_of
from turnwise.plan.routes import NodeRoutes
from turnwise.plan.target_sets import TargetSets


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Consecutive nodes that one pass computes, given the keys and values of those before."""

    start: int
    end: int
    blocks: Blocks
    """What its nodes attend to."""
    picked: Index
    """Which of the plan's K action tokens it predicts: those whose parent is in it."""
    nodes: Index
    """The nodes of those tokens. One occurs again only where turns were allowed different tokens there."""
    inverse: Index
    """Where each picked token finds its own among `nodes`."""
    places: Index | None = None
    """The set of allowed tokens of each of `nodes`; None where the plan has none."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Tokens in depth-first order of a forest, with the place of every action token.

    A token attends to its ancestors and itself: j is one of those of i exactly when j <= i < exit[j]. Packing is the
    forest without sharing: one chain per turn. A plan is computed in stretches, usually one.

    Example: turns 7 8 | 9 and 7 | 5 packed as two chains (prompt | action):
        tokens 7 8 9 7 5, depth 0 1 2 0 1, parent -1 0 1 -1 3, exit 3 3 3 5 5,
        turns 0 1, offsets 0 1 2, action_nodes 2 4
    """

    tokens: NDArray[np.int32]
    """[N]"""
    depth: NDArray[np.int32]
    """[N] position of the token in its sequence."""
    parent: NDArray[np.int32]
    """[N] index of the token before it, -1 at a root."""
    exit: NDArray[np.int32]
    """[N] end of the token's subtree."""
    turns: Index
    """[U] which turns of the mini-batch are laid out here."""
    offsets: Index
    """[U + 1] where each turn's action tokens begin in `action_nodes`."""
    action_nodes: Index
    """[K] the node of every action token, turn after turn."""
    num_stretches: int = 1
    """Passes the plan takes; more than one where a single path is longer than a pass may be."""
    allowed: TargetSets | None = None
    """[K] which tokens each action token was drawn from; None where no grammar guided any."""
    routes: NodeRoutes | None = None
    """[N] which experts each node takes; None where no turn has routes."""

    @classmethod
    def of_chains(cls, rows: NDArray[np.integer]) -> Plan:
        """Rows of equal length side by side, with no actions in them."""
        length = rows.shape[1]
        places = np.arange(rows.size, dtype=np.int32)
        depth = places % length
        return cls(
            tokens=rows.astype(np.int32).reshape(-1),
            depth=depth,
            parent=np.where(depth == 0, -1, places - 1).astype(np.int32),
            exit=places - depth + length,
            turns=np.zeros(0, np.int64),
            offsets=np.zeros(1, np.int64),
            action_nodes=np.zeros(0, np.int64),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and one it attends to."""
        return int(self.depth.sum(dtype=np.int64)) + self.num_tokens

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The nodes in passes of about equal size, in order; none where there are no nodes."""
        edges = np.linspace(0, self.num_tokens, self.num_stretches + 1).astype(np.int64).tolist()
        return tuple(self.stretch(start, end) for start, end in pairwise(edges) if start < end)

    def stretch(self, start: int, end: int) -> Stretch:
        return self.predicted(start, end, blocks_of(self.parent, self.exit, start, end))

    def part(self, start: int, end: int) -> Stretch:
        """Nodes of a stretch whose attention is computed with all of it: they have no blocks of their own."""
        return self.predicted(start, end, Blocks((), ()))

    def idle_part(self, start: int, end: int) -> Stretch:
        """Nodes that are computed and predict nothing."""
        nothing = np.zeros(0, np.int64)
        places = None if self.allowed is None else nothing
        return Stretch(start, end, Blocks((), ()), nothing, nothing, nothing, places)

    def predicted(self, start: int, end: int, blocks: Blocks) -> Stretch:
        """Nodes with the action tokens whose parent is one of them."""
        parents = self.parent[self.action_nodes]
        picked = np.flatnonzero((parents >= start) & (parents < end))
        if self.allowed is None:
            nodes, inverse = np.unique(self.action_nodes[picked], return_inverse=True)
            return Stretch(start, end, blocks, picked, nodes, inverse)
        base = len(self.allowed.sets) + 1
        pairs = self.action_nodes[picked] * base + self.allowed.places[picked] + 1
        pairs, inverse = np.unique(pairs, return_inverse=True)
        return Stretch(start, end, blocks, picked, pairs // base, inverse, pairs % base - 1)

    def gather(self, per_turn: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """[K] one number per action token from arrays per turn of the whole mini-batch."""
        return np.concatenate([per_turn[turn] for turn in self.turns]) if len(self.turns) else np.zeros(0, np.float32)
