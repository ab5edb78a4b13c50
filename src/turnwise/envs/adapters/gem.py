"""gem: games and questions in text, with rewards per turn. It seeds Python's and numpy's global generators."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from turnwise.envs.adapters.adapter import Registered, user_message
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task


class Gem(Registered):
    """An environment that `gem.make` knows.

    Example:
        user: You are playing Guess The Number...                        assistant: \\boxed{5}
        user: At turn 1, you guessed 5, and the target number is higher  assistant: \\boxed{8}      -> reward 1
    """

    library = "gem"
    install = "pip install --no-deps gem-llm==0.1.0, and what it imports: see docs/guides/envs/adapters.md"
    example = "gem:game:GuessTheNumber-v0-easy"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """options: arguments of the environment; they replace the registered ones."""
        self.options = dict(options or {})

    @classmethod
    def demonstrates(cls) -> bool:
        return cls.name.startswith("game:GuessTheNumber-")

    def open(self, task: Task) -> Reply:
        import gem

        self.game = gem.make(self.name, **self.options)
        observation, info = self.game.reset(seed=task.data["seed"])
        return Reply(user_message(with_suffix(observation, info)))

    def step(self, message: Message) -> Reply:
        observation, reward, terminated, truncated, info = self.game.step(message.content)
        if terminated or truncated:
            marks = {"truncated": float(truncated)}
            return Reply(user_message(str(observation)), reward=reward, finished=True, marks=marks)
        return Reply(user_message(with_suffix(observation, info)), reward=reward)

    def close(self) -> None:
        return None

    def demonstrate(self, noise: float, random: Random) -> str:
        """Bisection; with probability `noise` a random number."""
        low, high = self.game.min_number, self.game.max_number
        if random.random() < noise:
            return f"\\boxed{{{random.randint(low, high)}}}"
        for guess in self.game.previous_guesses:  # the answer to each was higher or lower
            low, high = (max(low, guess + 1), high) if guess < self.game.game_number else (low, min(high, guess - 1))
        return f"\\boxed{{{(low + high) // 2}}}"


def with_suffix(observation: Any, info: Mapping[str, Any]) -> str:
    """An observation with the suffix that the library's wrappers would append to it."""
    return f"{observation}\n{info.get('suffix', '')}"
