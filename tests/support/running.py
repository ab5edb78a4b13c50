"""A micro recipe and helpers to run it, for tests of whole runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from turnwise.assemble import run
from turnwise.cli.terminal import PlainScreen
from turnwise.recipe.parse import load_recipe
from turnwise.recipe.schema import Recipe

MICRO = """
steps = 4
groups_per_step = 4
max_tokens_per_microbatch = 2048
[model]
hidden = 32
layers = 1
threads = 1
[[env]]
name = "hops"
tasks = { count = 64, links = [1, 2] }
[rollout]
group_size = 4
max_turns = 4
max_prompt_tokens = 150
max_action_tokens = 6
max_trajectory_tokens = 160
[rollout.limits]
call_seconds = 20
[engine]
max_num_seqs = 16
[loss]
name = "ppo_clip"
anchor = "engine"
[optimizer]
learning_rate = 1e-3
[evaluation]
every = 2
tasks = 8
final_tasks = 16
[sft]
updates = 4
batch = 8
[checkpoints]
every = 2
"""


class SilentScreen(PlainScreen):
    """Keeps what is said instead of printing it."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, done: int, metrics: Any) -> None:
        return None


def micro_toml(folder: Path, text: str = MICRO) -> Path:
    path = folder / "micro.toml"
    path.write_text(text)
    return path


def micro_recipe(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(micro_toml(folder), [f"out={folder / 'run'}", *overrides])


def train(recipe: Recipe, screen: PlainScreen | None = None) -> dict[str, Any] | None:
    async def work() -> dict[str, Any] | None:
        return await run.start(recipe, screen or SilentScreen(), asyncio.Event())

    return asyncio.run(work())


def resume(folder: Path) -> dict[str, Any] | None:
    async def work() -> dict[str, Any] | None:
        return await run.resume(folder, SilentScreen(), asyncio.Event())

    return asyncio.run(work())


def untimed(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file without what a clock has measured."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("seconds/", "speed/"))} for line in lines]
