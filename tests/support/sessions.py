"""What tests of the Python interface share: an environment that no module offers by name, and the smallest recipe."""

from __future__ import annotations

import tomllib
from typing import Any

import turnwise as tw
from turnwise.testing.micro import MICRO

SMALL = {
    "steps": 2,
    "groups_per_step": 2,
    "model": {"hidden": 16},
    "rollout": {"group_size": 2, "max_turns": 2},
    "evaluation": {"every": 1, "tasks": 2, "final_tasks": 2},
    "sft": {"updates": 0},
    "checkpoints": {"every": 1, "keep": 8},
}


def small(**keys: Any) -> tw.Recipe:
    """The micro recipe at its smallest: two steps of four attempts, without a warm start."""
    return tw.Recipe(**tomllib.loads(MICRO)).change(**SMALL).change(**keys)


def without_environment(**keys: Any) -> tw.Recipe:
    """The same, with no environment named."""
    return small(env=None).change(**keys)


def make_echo() -> type:
    """A class that no module has: it pays for every "a" that it hears."""

    class Echo:
        def __init__(self, price: float = 0.25) -> None:
            self.price = price

        def open(self, task: tw.Task) -> tw.Reply:
            return tw.Reply((tw.Message("user", f"say {task.data['letter']}"),))

        def step(self, message: tw.Message) -> tw.Reply:
            return tw.Reply(finished=True, outcome=self.price * message.content.count("a"))

        def close(self) -> None:
            return None

        @staticmethod
        def tasks(split: str, seed: int, count: int = 8) -> list[tw.Task]:
            return [tw.Task(f"{split}-{number}", "echo", {"letter": "a"}) for number in range(count)]

        def demonstrate(self, noise: float, random: object) -> str:
            return "a"

    return Echo
