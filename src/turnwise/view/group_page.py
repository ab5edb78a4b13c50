"""A group as a tree of shared tokens, and the place where two of its attempts part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from turnwise.inspect.attempts import AttemptKey
from turnwise.inspect.difference import difference
from turnwise.inspect.group_tree import Chain, GroupTree, TreeNode, group_tree
from turnwise.tokens import Tokens
from turnwise.types import Trajectory
from turnwise.view.attempt_page import siblings
from turnwise.view.clipped import number
from turnwise.view.table import whole_number
from turnwise.view.watched_run import WatchedRun

LABEL_TOKENS = 24
"""Tokens of a node that are sent with the tree."""
NODE_TOKENS = 4096
LARGEST_TREE = 4000
"""Nodes that are sent: those nearest to the roots."""


def tree_page(run: WatchedRun, kind: str, step: int, group: int) -> dict[str, Any]:
    """The tree of a group, with the beginning of each node's text."""
    record = run.reader.group(kind, step, group)
    attempts = (*record.group.trajectories, *record.group.failed)
    found = group_tree(attempts)
    kept = within(found, LARGEST_TREE)
    place = {old: new for new, old in enumerate(kept)}
    return {
        "run": run.name,
        "key": f"{kind}/{step}/{group}",
        "task": {"id": record.group.task.id, "dataset": record.group.task.dataset},
        "trained": record.kept,
        "attempts": siblings(run, AttemptKey(kind, step, group, 0)),
        "chains": [chain_page(chain, attempts) for chain in found.chains],
        "nodes": [node_page(run, found.nodes[old], place, attempts, found) for old in kept],
        "left_out": len(found.nodes) - len(kept),
        "unique_tokens": found.unique_tokens,
        "chain_tokens": found.chain_tokens,
        "turn_tokens": found.turn_tokens,
    }


def within(tree: GroupTree, limit: int) -> list[int]:
    """Places of at most `limit` nodes: whole levels from the roots on, then a part of the next."""
    order = sorted(range(len(tree.nodes)), key=lambda place: tree.nodes[place].start)
    return sorted(order[:limit])


def chain_page(chain: Chain, attempts: tuple[Trajectory, ...]) -> dict[str, Any]:
    return {
        "attempt": chain.attempt,
        "first_turn": chain.first_turn,
        "last_turn": chain.last_turn,
        "tokens": len(chain.tokens),
        "broke": str(chain.broke),
        "lost_tokens": chain.lost_tokens,
        "reward": number(attempts[chain.attempt].total),
        "status": str(attempts[chain.attempt].status),
    }


def node_page(
    run: WatchedRun, node: TreeNode, place: Mapping[int, int], attempts: tuple[Trajectory, ...], tree: GroupTree
) -> dict[str, Any]:
    passing = {tree.chains[chain].attempt for chain in node.chains}
    rewards = [attempts[attempt].total for attempt in passing]
    return {
        "parent": place.get(node.parent, -1),
        "start": node.start,
        "count": len(node.tokens),
        "sampled": node.sampled,
        "first_chain": node.chains[0],
        "last_chain": node.chains[-1],
        "uses": node.num_uses,
        "attempts": len(passing),
        "turn": tree.chains[node.chains[0]].turn_at(node.start),
        "reward": number(sum(rewards) / len(rewards)),
        "text": text_of(run, node.tokens[:LABEL_TOKENS]),
    }


def node_text(run: WatchedRun, kind: str, step: int, group: int, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The text of tokens of a chain between two depths."""
    record = run.reader.group(kind, step, group)
    attempts = (*record.group.trajectories, *record.group.failed)
    names = ("attempt", "turn", "from", "to")
    attempt, turn, start, end = (max(0, whole_number(name, parameters.get(name) or "0")) for name in names)
    try:
        found = attempts[attempt].turns[turn]
    except IndexError:
        raise ValueError(f"this group has no turn {turn} of an attempt {attempt}") from None
    tokens = (*found.prompt[start:end].tolist(), *found.action[max(0, start - len(found.prompt)) :].tolist())
    shown = tokens[: max(0, min(end - start, NODE_TOKENS))]
    return {"tokens": shown, "texts": run.reader.text_of.pieces(shown), "left_out": max(0, end - start - len(shown))}


def text_of(run: WatchedRun, tokens: Tokens) -> str:
    return "".join(run.reader.text_of.pieces(tokens))


def difference_page(run: WatchedRun, kind: str, step: int, group: int, one: int, other: int) -> dict[str, Any]:
    """Where two attempts of a group part."""
    keys = [AttemptKey(kind, step, group, attempt) for attempt in (one, other)]
    found = [run.reader.attempt(key).trajectory for key in keys]
    return {
        "run": run.name,
        "keys": [str(key) for key in keys],
        "group": siblings(run, keys[0]),
        **asdict(difference(*found)),
    }
