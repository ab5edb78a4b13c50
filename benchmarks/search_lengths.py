"""How wide and how long the batches of a search agent are, in four layouts.

    python benchmarks/search_lengths.py [--quick] [--json PATH]

No model is needed: the environment's own expert plays, with mistakes, over the real corpus and the real retrieval
server, and the tokenizer of SmolLM2 counts. Limits are those of the field's report: prompts of up to 4096 tokens,
actions of up to 500. First: turnwise data factbook; turnwise data smollm2-135m.

A row is a turn. Padded to one width, as others do, prompts are left of responses, each side as wide as its widest:
    observations   a response is an action and the observation after it, which the next row has in its prompt again
    actions        a response is an action
Without padding:
    packed         every turn by itself
    shared         prefixes in common are computed once: unique tokens. Its width is that of the longest conversation
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.data.catalogue import model_folder
from turnwise.envs.search.env import Search
from turnwise.learn.policy import load_tokenizer
from turnwise.plan.pack import pack
from turnwise.plan.tree import tree
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.demonstrate import Demonstrator
from turnwise.rollout.limits import Limits
from turnwise.rollout.render.renderer import Renderer
from turnwise.types import Task, Trajectory

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
FIELD = {"observations": 9434, "actions": 3897, "shared": 3000}
"""What others report of the padded width; the last is an upper bound."""
NOISE = 0.5
"""Share of searches for two words of the question, which find anything."""


def observed(renderer: Renderer, made: Trajectory) -> list[int]:
    """Tokens of the observation after each turn, the last included, which no prompt has."""
    return [sum(len(renderer.encode(message.content)) for message in turn.heard) for turn in made.turns]


def measure(renderer: Renderer, groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """The figures of one batch."""
    trajectories = [made for group in groups for made in group]
    turns = [turn for made in trajectories for turn in made.turns]
    prompts, actions = [len(turn.prompt) for turn in turns], [len(turn.action) for turn in turns]
    after = [size for made in trajectories for size in observed(renderer, made)]
    widths = {
        "observations": max(prompts) + max(np.add(actions, after)),
        "actions": max(prompts) + max(actions),
        "shared": max(np.add(prompts, actions)),
    }
    return {
        "attempts": len(trajectories),
        "turns": len(turns),
        "observation_tokens": {"mean": float(np.mean(after)), "max": max(after)},
        "statuses": {
            str(s.name): sum(made.status is s for made in trajectories) for s in {m.status for m in trajectories}
        },
        "width": {name: int(width) for name, width in widths.items()},
        "tokens": {
            "observations": int(len(turns) * widths["observations"]),
            "actions": int(len(turns) * widths["actions"]),
            "packed": sum(plan.num_tokens for plan in pack(turns, 1 << 30)),
            "shared": sum(tree([turn for made in group for turn in made.turns]).num_tokens for group in groups),
        },
    }


async def played(
    renderer: Renderer, settings: Mapping[str, Any], tasks: Sequence[Task], attempts: int
) -> list[list[Trajectory]]:
    """The groups of a batch with so many attempts at each task."""
    expert = Demonstrator({"search": lambda: Search(**settings)}, renderer, LIMITS, seed=0, noise=NOISE)

    async def group(task: Task) -> list[Trajectory]:
        made = await all_of(expert.group(task, epoch) for epoch in range(attempts))
        return [trajectory for one in made for trajectory in one.trajectories]

    return [await group(task) for task in tasks]


def describe(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{'':8} {'':>26} {'observations':>14} {'actions':>10} {'packed':>10} {'shared':>10}"]
    for case, figures in found.items():
        width, tokens = figures["width"], figures["tokens"]
        mean, most = figures["observation_tokens"]["mean"], figures["observation_tokens"]["max"]
        times = {name: count / tokens["shared"] for name, count in tokens.items()}
        each = {name: count / figures["attempts"] for name, count in tokens.items()}
        lines += [
            f"{case:8} {'width':>26} {width['observations']:14,} {width['actions']:10,} {'':>10} {width['shared']:10,}",
            f"{'':8} {'tokens of the batch':>26} {table(tokens, ',.0f')}",
            f"{'':8} {'tokens per attempt':>26} {table(each, ',.0f')}",
            f"{'':8} {'times the unique ones':>26} {table(times, '.1f')}",
            f"{'':8} {figures['attempts']} attempts, {figures['turns']} turns; observations of {mean:.0f} tokens, "
            f"{most:,} at most; {figures['statuses']}",
        ]
    field = f"{FIELD['observations']:14,} {FIELD['actions']:10,} {'':>10} {'< 3,000':>10}"
    return [*lines, f"{'field':8} {'width, as reported':>26} {field}"]


def table(numbers: Mapping[str, float], form: str) -> str:
    shown = {name: format(number, form) for name, number in numbers.items()}
    return f"{shown['observations']:>14} {shown['actions']:>10} {shown['packed']:>10} {shown['shared']:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tasks: shows that it runs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    renderer = Renderer(load_tokenizer(model_folder("smollm2-135m")))
    tasks = list(Search.tasks("train", seed=0, count=2 if chosen.quick else 16, hops=(2, 3)))
    attempts = 2 if chosen.quick else 8
    found = {
        case: measure(renderer, asyncio.run(played(renderer, settings, tasks, attempts)))
        for case, settings in CASES.items()
    }
    print("\n".join(describe(found)))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
