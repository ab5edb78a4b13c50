"""Rows: turns one below the other, padded to one width, or merged into the turn before.

Other systems lay turns out so, and plans are compared with it. Models whose layers hand a state from token to token
cannot be computed otherwise: for them a plan is made of such rows (`in_rows`).

Only what a turn's prompt begins with all of is merged: a history that was cut or written anew shares nothing. Turns
without an action do not train and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.plan.blocks import Index
from turnwise.plan.pack import fill
from turnwise.plan.plan import Plan
from turnwise.plan.routes import SettledRoutes, settle_routes
from turnwise.plan.target_sets import TargetSets
from turnwise.tokens import extends
from turnwise.types import Turn


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Turns one below the other, padded on the right: what one pass of a padded batch computes.

    Example: turns 7 8 | 9 and 7 | 5 (prompt | action):
        Rows(turns=[0, 1], width=3) stands for 7 8 9 and 7 5 0
    """

    turns: Index
    """[R] which turns of the mini-batch."""
    width: int

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return len(self.turns) * self.width

    @property
    def num_pairs(self) -> int:
        """Of query and key, where attention is causal and knows nothing of padding."""
        return len(self.turns) * self.width * (self.width + 1) // 2

    def fill_in(self, turns: Sequence[Turn]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(tokens [R, width], 1 where there is one and 0 at padding)."""
        tokens = np.zeros((len(self.turns), self.width), np.int64)
        mask = np.zeros_like(tokens)
        for row, turn in enumerate(self.turns):
            size = length(turns[turn])
            tokens[row, :size] = np.concatenate([turns[turn].prompt, turns[turn].action])
            mask[row, :size] = 1
        return tokens, mask


def length(turn: Turn) -> int:
    return len(turn.prompt) + len(turn.action)


def trained(turns: Sequence[Turn]) -> list[int]:
    """The turns with an action, in order."""
    return [place for place, turn in enumerate(turns) if len(turn.action)]


def pad(turns: Sequence[Turn], tokens_per_pass: int) -> list[Rows]:
    """Padded rows in the order of the turns, as many in a pass as fit; a single row over the budget stands alone."""
    return batched(turns, trained(turns), tokens_per_pass)


def pad_by_length(turns: Sequence[Turn], tokens_per_pass: int) -> list[Rows]:
    """The same in the order of length, so that neighbours need little padding."""
    return batched(turns, sorted(trained(turns), key=lambda place: length(turns[place])), tokens_per_pass)


def batched(turns: Sequence[Turn], order: Sequence[int], budget: int) -> list[Rows]:
    sizes = {place: length(turns[place]) for place in order}
    return [Rows(np.array(part, np.int64), max(sizes[row] for row in part)) for part in padded(order, sizes, budget)]


def padded(order: Sequence[int], sizes: Mapping[int, int] | Sequence[int], budget: int) -> list[list[int]]:
    """Rows in their order, as many in a part as fit when all have the width of the longest."""
    found: list[list[int]] = []
    width = 0
    for row in order:
        wider = max(width, sizes[row])
        if not found or (len(found[-1]) + 1) * wider > budget:
            found.append([])
            wider = sizes[row]
        found[-1].append(row)
        width = wider
    return found


def merge(turns: Sequence[Turn], tokens_per_pass: int) -> list[Plan]:
    """Plans in which a turn continues the one before it where its prompt begins with all of that, packed by length.

    A single chain over the budget is refused: it could not be computed in one pass.
    """
    chains, lengths = chains_of(turns, tokens_per_pass)
    parts = fill(np.argsort(lengths, kind="stable"), lengths, tokens_per_pass)
    routes = settle_routes(turns)
    return [lay_out(turns, [chains[chain] for chain in part], routes) for part in parts]


def in_rows(turns: Sequence[Turn], tokens_per_pass: int) -> list[Plan]:
    """The same chains, so many in a plan as fit below one another when all are padded to the longest: a chain is
    computed as a row of its own. A single chain over the budget is refused."""
    chains, lengths = chains_of(turns, tokens_per_pass)
    order = np.argsort(lengths, kind="stable").tolist()
    parts = padded(order, lengths.tolist(), tokens_per_pass)
    return [lay_out(turns, [chains[chain] for chain in part]) for part in parts]


def chains_of(turns: Sequence[Turn], tokens_per_pass: int) -> tuple[list[list[int]], Index]:
    """(turns each of which continues the one before, the tokens of each such chain)."""
    chains: list[list[int]] = []
    for place in trained(turns):
        if chains and extends(turns[place], turns[chains[-1][-1]]):
            chains[-1].append(place)
        else:
            chains.append([place])
    lengths = np.array([length(turns[chain[-1]]) for chain in chains], np.int64)
    if (longest := int(lengths.max(initial=0))) > tokens_per_pass:
        raise ValueError(
            f"a merged chain has {longest} tokens, more than {tokens_per_pass}; raise max_tokens_per_microbatch"
        )
    return chains, lengths


def lay_out(turns: Sequence[Turn], chains: Sequence[Sequence[int]], routes: SettledRoutes | None = None) -> Plan:
    """One plan with the tokens of the last turn of every chain, which hold the others'."""
    lasts = [turns[chain[-1]] for chain in chains]
    lengths = np.array([length(turn) for turn in lasts], np.int64)
    ends = np.cumsum(lengths)
    places = np.arange(int(ends[-1]), dtype=np.int64)
    depth = places - np.repeat(ends - lengths, lengths)
    starts = {turn: int(end - size) for chain, end, size in zip(chains, ends, lengths, strict=True) for turn in chain}
    nodes = [start + np.arange(len(turns[turn].prompt), length(turns[turn])) for turn, start in starts.items()]
    return Plan(
        tokens=np.concatenate([part for turn in lasts for part in (turn.prompt, turn.action)]),
        depth=depth.astype(np.int32),
        parent=np.where(depth == 0, -1, places - 1).astype(np.int32),
        exit=np.repeat(ends, lengths).astype(np.int32),
        turns=np.array(list(starts), np.int64),
        offsets=np.concatenate(([0], np.cumsum([len(of_turn) for of_turn in nodes]))).astype(np.int64),
        action_nodes=np.concatenate(nodes),
        allowed=TargetSets.of(turns, list(starts)),
        routes=None
        if routes is None
        else routes.of_tokens([(chain[-1], 0, length(turns[chain[-1]])) for chain in chains]),
    )
