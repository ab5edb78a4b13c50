"""Packing: turns side by side without padding and without sharing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnwise.plan.plan import Plan
from turnwise.plan.routes import SettledRoutes, settle_routes
from turnwise.plan.target_sets import TargetSets
from turnwise.types import Turn


def pack(turns: Sequence[Turn], tokens_per_pass: int) -> list[Plan]:
    """Plans of at most `tokens_per_pass` tokens that hold every turn with an action exactly once.

    Turns are laid out by length, so that equal ones stand together. A single turn over the budget is refused: it
    could not be computed in one pass.
    """
    lengths = np.array([len(turn.prompt) + len(turn.action) for turn in turns], np.int64)
    trained = np.array([len(turn.action) > 0 for turn in turns], bool)
    if len(turns) and (longest := int(lengths[trained].max(initial=0))) > tokens_per_pass:
        raise ValueError(f"a turn has {longest} tokens, more than {tokens_per_pass}; raise max_tokens_per_microbatch")
    order = np.argsort(lengths, kind="stable")
    order = order[trained[order]]
    routes = settle_routes(turns)
    return [lay_out(turns, part, routes) for part in fill(order, lengths, tokens_per_pass)]


def fill(order: np.ndarray, lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """The order cut into as few consecutive parts within the budget as possible, made about equally full."""
    total = int(lengths[order].sum())
    num_parts = max(1, -(-total // budget))
    while True:
        target = min(budget, -(-total // num_parts) + int(lengths[order].max(initial=0)))
        parts, size = [0], 0
        for place, length in enumerate(lengths[order]):
            if size + length > target:
                parts.append(place)
                size = 0
            size += length
        if len(parts) <= num_parts or target == budget:
            return [part for part in np.split(order, parts[1:]) if len(part)]
        num_parts += 1


def lay_out(turns: Sequence[Turn], chosen: np.ndarray, routes: SettledRoutes | None = None) -> Plan:
    """One plan with a chain for each chosen turn."""
    prompt_sizes = np.array([len(turns[i].prompt) for i in chosen], np.int64)
    action_sizes = np.array([len(turns[i].action) for i in chosen], np.int64)
    lengths = prompt_sizes + action_sizes
    ends = np.cumsum(lengths)
    starts = ends - lengths
    places = np.arange(int(ends[-1]), dtype=np.int64)
    depth = places - np.repeat(starts, lengths)
    parts = [part for i in chosen for part in (turns[i].prompt, turns[i].action)]
    offsets = np.concatenate(([0], np.cumsum(action_sizes)))
    action_nodes = np.arange(offsets[-1]) + np.repeat(starts + prompt_sizes - offsets[:-1], action_sizes)
    return Plan(
        tokens=np.concatenate(parts),
        depth=depth.astype(np.int32),
        parent=np.where(depth == 0, -1, places - 1).astype(np.int32),
        exit=np.repeat(ends, lengths).astype(np.int32),
        turns=np.asarray(chosen, np.int64),
        offsets=offsets,
        action_nodes=action_nodes,
        allowed=TargetSets.of(turns, chosen),
        routes=None
        if routes is None
        else routes.of_tokens([(int(i), 0, int(size)) for i, size in zip(chosen, lengths, strict=True)]),
    )
