"""The prefix tree of a group: which tokens its attempts share, where they part, where prefixes broke and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from turnwise.plan.tree import sequence_of
from turnwise.tokens import Tokens, common_prefix, extends, lost_tokens
from turnwise.types import Break, Trajectory, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Turns of an attempt in a row, each of which begins with the one before: the last has the tokens of all."""

    attempt: int
    first_turn: int
    turns: tuple[Turn, ...]
    tokens: Tokens
    """Prompt and action of the last turn."""
    broke: Break
    """Why the first turn does not begin with the turn before; none at the start of an attempt."""
    lost_tokens: int
    """Tokens of the turn before that the first turn does not begin with."""

    @property
    def last_turn(self) -> int:
        return self.first_turn + len(self.turns) - 1

    def turn_at(self, depth: int) -> int:
        """The first of its turns that has the token at a depth."""
        lengths = [len(turn.prompt) + len(turn.action) for turn in self.turns]
        return self.first_turn + next(place for place, length in enumerate(lengths) if length > depth)

    def is_sampled(self, depth: int) -> bool:
        """Whether the token at a depth is in the action of one of its turns."""
        return any(0 <= depth - len(turn.prompt) < len(turn.action) for turn in self.turns)


@dataclass(frozen=True, slots=True, eq=False)
class TreeNode:
    """A stretch of tokens that the same turns share: sampled by one of them, or given to all."""

    parent: int
    """Place of the node before, -1 for a root."""
    start: int
    """Tokens before it."""
    tokens: Tokens
    sampled: bool
    chains: tuple[int, ...]
    """Places of the chains that pass through it, one after the other."""
    num_uses: int
    """Turns that have it in their prompt or action."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupTree:
    """The nodes of a group in depth-first order, each after its parent.

    Example:
        group_tree(record.group.trajectories).unique_tokens
    """

    chains: tuple[Chain, ...]
    """In the order of the tree: those that share most stand together."""
    nodes: tuple[TreeNode, ...]
    turn_tokens: int
    """Prompt and action of each turn, added up: what is computed if no turn shares anything."""
    chain_tokens: int
    """The same with one sequence for each chain."""

    @property
    def unique_tokens(self) -> int:
        """What is computed if every shared prefix is computed once."""
        return sum(len(node.tokens) for node in self.nodes)


def group_tree(attempts: Sequence[Trajectory]) -> GroupTree:
    """The tree of all turns of some attempts."""
    chains = [chain for number, attempt in enumerate(attempts) for chain in chains_of(number, attempt.turns)]
    # Big-endian bytes compare as the tokens do, so chains that share a prefix stand together.
    chains.sort(key=lambda chain: chain.tokens.astype(">u4").tobytes())
    turns = [turn for attempt in attempts for turn in attempt.turns]
    return GroupTree(
        tuple(chains),
        tuple(nodes_of(chains)),
        sum(len(turn.prompt) + len(turn.action) for turn in turns),
        sum(len(chain.tokens) for chain in chains),
    )


def chains_of(attempt: int, turns: Sequence[Turn]) -> list[Chain]:
    """The turns of an attempt, cut where a prefix broke."""
    starts = [place for place, turn in enumerate(turns) if not place or not extends(turn, turns[place - 1])]
    chains = []
    for start, end in pairwise([*starts, len(turns)]):
        broke = turns[start].broke if start else Break.none
        lost = lost_tokens(turns[start], turns[start - 1]) if start else 0
        part = tuple(turns[start:end])
        chains.append(Chain(attempt, start, part, sequence_of(part[-1]), broke, lost))
    return chains


def nodes_of(chains: Sequence[Chain]) -> list[TreeNode]:
    """The nodes of sorted chains. A node ends where chains part, or where sampled tokens begin or end in one of them.

    Python loops over nodes and chains, never over tokens.
    """
    cuts = [np.unique([edge for turn in chain.turns for edge in edges_of(turn)]) for chain in chains]
    nodes: list[TreeNode] = []
    waiting = [(-1, 0, part) for part in reversed(parted(chains, range(len(chains)), 0))]
    while waiting:
        parent, start, among = waiting.pop()
        first, last = chains[among[0]].tokens, chains[among[-1]].tokens
        ends = [start + common_prefix(first[start:], last[start:])]
        ends += [int(edges[np.searchsorted(edges, start, side="right")]) for edges in (cuts[place] for place in among)]
        end = min(ends)
        uses = sum(len(t.prompt) + len(t.action) > start for place in among for t in chains[place].turns)
        sampled = any(chains[place].is_sampled(start) for place in among)
        nodes.append(TreeNode(parent, start, first[start:end], sampled, tuple(among), uses))
        waiting += [(len(nodes) - 1, end, part) for part in reversed(parted(chains, among, end))]
    return nodes


def edges_of(turn: Turn) -> tuple[int, int]:
    """Where the action of a turn begins and ends."""
    return len(turn.prompt), len(turn.prompt) + len(turn.action)


def parted(chains: Sequence[Chain], among: Sequence[int], depth: int) -> list[list[int]]:
    """Chains that share what comes before a depth, by the token that they have there; those that end there left out."""
    parts: list[list[int]] = []
    before = -1
    for place in among:
        tokens = chains[place].tokens
        if len(tokens) <= depth:
            continue
        if not parts or tokens[depth] != before:
            parts.append([])
        parts[-1].append(place)
        before = tokens[depth]
    return parts
