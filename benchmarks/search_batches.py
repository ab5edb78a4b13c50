"""Batches of a search agent, and how wide and how long they are in six layouts. See search_layouts.py."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from turnwise.envs.search.env import Search
from turnwise.plan.pack import pack
from turnwise.plan.rows import chains_of
from turnwise.plan.tree import tree
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.demonstrate import Demonstrator
from turnwise.rollout.limits import Limits
from turnwise.rollout.render.renderer import Renderer
from turnwise.types import Trajectory, Turn

LIMITS = Limits(
    max_turns=10,
    max_prompt_tokens=4096,
    max_action_tokens=500,
    max_trajectory_tokens=4596,
    call_seconds=300.0,
    attempt_seconds=3000.0,
)
CASES = {"cut": {"topk": 3, "characters": 2000}, "uncut": {"topk": 20, "characters": 1_000_000}}
"""Passages per search, and characters that they have together: about Search-R1's 500 tokens, and twenty as they are."""
NOISE = 0.5
"""Share of searches for two words of the question, which find anything."""
Groups = Sequence[Sequence[Trajectory]]


def played(renderer: Renderer, case: str, seed: int, tasks: int, attempts: int) -> Groups:
    """The groups of a batch, with so many attempts at each task."""
    expert = Demonstrator({"search": lambda: Search(**CASES[case])}, renderer, LIMITS, seed=seed, noise=NOISE)

    async def play() -> Groups:
        groups = []
        for task in Search.tasks("train", seed=seed, count=tasks, hops=(2, 3)):
            made = await all_of(expert.group(task, epoch) for epoch in range(attempts))
            groups.append([trajectory for one in made for trajectory in one.trajectories])
        return groups

    return asyncio.run(play())


def folded(groups: Groups, vocabulary: int) -> Groups:
    """The same attempts with token numbers modulo the vocabulary of a smaller model."""

    def fold(turn: Turn) -> Turn:
        return replace(turn, prompt=turn.prompt % vocabulary, action=turn.action % vocabulary)

    return [[Trajectory(tuple(map(fold, made.turns)), made.status, made.outcome) for made in group] for group in groups]


def observed(renderer: Renderer, made: Trajectory) -> list[int]:
    """Tokens of the observation after each turn, the last included, which no prompt has."""
    return [sum(len(renderer.encode(message.content)) for message in turn.heard) for turn in made.turns]


def turns_in(groups: Groups) -> list[Turn]:
    return [turn for group in groups for trajectory in group for turn in trajectory.turns]


def trained(groups: Groups) -> list[Turn]:
    return [turn for turn in turns_in(groups) if len(turn.action)]


def sides(renderer: Renderer, groups: Groups) -> dict[str, tuple[int, int]]:
    """(width left of where responses begin, width right of it) of the padded layouts."""
    turns = turns_in(groups)
    prompts, actions = [len(turn.prompt) for turn in turns], [len(turn.action) for turn in turns]
    after = [size for group in groups for made in group for size in observed(renderer, made)]
    chains, lengths = chains_of(turns, 1 << 30)
    first = [len(turns[chain[0]].prompt) for chain in chains]
    return {
        "observations": (max(prompts), max(np.add(actions, after))),
        "actions": (max(prompts), max(actions)),
        "trajectories": (max(first), max(np.subtract(lengths, first))),
    }


def measure(renderer: Renderer, groups: Groups) -> dict[str, Any]:
    """Widths and tokens of a batch in every layout. Without padding there is no width but that of the longest part."""
    turns = turns_in(groups)
    chains, lengths = chains_of(turns, 1 << 30)
    widths = {name: int(left + right) for name, (left, right) in sides(renderer, groups).items()}
    longest = max(len(turn.prompt) + len(turn.action) for turn in turns)
    rows = len(trained(groups))
    after = [size for group in groups for made in group for size in observed(renderer, made)]
    statuses = [made.status.name for group in groups for made in group]
    return {
        "attempts": len(statuses),
        "turns": len(turns),
        "chains": len(chains),
        "statuses": {name: statuses.count(name) for name in sorted(set(statuses))},
        "observation": {"mean": float(np.mean(after)), "max": max(after)},
        "width": {**widths, "packed": longest, "merged": longest, "tree": longest},
        "tokens": {
            "observations": rows * widths["observations"],
            "actions": rows * widths["actions"],
            "trajectories": len(chains) * widths["trajectories"],
            "packed": sum(plan.num_tokens for plan in pack(turns, 1 << 30)),
            "merged": int(lengths.sum()),
            "tree": sum(tree([turn for made in group for turn in made.turns]).num_tokens for group in groups),
        },
    }


def unique_to(tokens: Mapping[str, int]) -> dict[str, float]:
    """How many times the unique tokens each layout has."""
    return {name: count / tokens["tree"] for name, count in tokens.items()}
