"""The plan: how turns are laid out for the model. Numpy only; knows nothing of credit, losses or devices.

Letters: N tokens of the plan, U turns, K action tokens of all its turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Plan:
    """Tokens in depth-first order of a forest, with the place of every action token.

    A token attends to its ancestors and itself: j is one of those of i exactly when j <= i < exit[j]. Packing is the
    forest without sharing: one chain per turn.

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

    @cached_property
    def unique_nodes(self) -> tuple[Index, Index]:
        """Action nodes without repeats, and where each of the K action tokens finds its own among them."""
        return np.unique(self.action_nodes, return_inverse=True)

    @cached_property
    def chains(self) -> list[tuple[int, int]]:
        """(length, number) of consecutive chains of equal length: what attention can take in one batch."""
        starts = np.flatnonzero(self.parent < 0)
        lengths = np.diff(np.append(starts, self.num_tokens))
        edges = np.flatnonzero(np.diff(lengths)) + 1
        firsts = np.concatenate(([0], edges)).astype(np.int64)
        counts = np.diff(np.append(firsts, len(lengths)))
        return [(int(lengths[first]), int(count)) for first, count in zip(firsts, counts, strict=True)]

    def gather(self, per_turn: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """[K] one number per action token from arrays per turn of the whole mini-batch."""
        return np.concatenate([per_turn[turn] for turn in self.turns]) if len(self.turns) else np.zeros(0, np.float32)
