"""guess: find a number between bounds; every wrong guess is answered with higher or lower."""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Any, ClassVar

from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.messages import Message
from turnwise.types import Task

SYSTEM = "Guess the number. After each guess you hear higher or lower."
NUMBER = re.compile(r"-?[0-9]{1,9}")


class Guess:
    """An attempt: a secret number between two bounds.

    Example:
        user: between 1 and 16      assistant: 8
        user: higher                assistant: 12      -> outcome 1
    """

    task_fields: ClassVar[dict[str, Any]] = {"low": int, "high": int, "secret": int}

    def __init__(self, guesses: int = 7, window: bool = False) -> None:
        """guesses: how many the agent has. window: show only what is known now, the bounds that are left and the number
        of guesses, so that the agent need not remember or compute them."""
        self.guesses = guesses
        self.window = window

    @staticmethod
    def tasks(split: str, seed: int, count: int = 256, high: int = 64) -> Iterator[Task]:
        """Different pairs of bounds within 1..high with a secret between them. The bounds decide the split: were it the
        secret too, training would teach which numbers between known bounds are never the secret, those held out."""
        if high < 2:
            raise ValueError(f"high = {high}: needs at least 2")

        def draw(random: Random) -> dict[str, Any]:
            low, top = sorted(random.sample(range(1, high + 1), 2))
            return {"low": low, "high": top, "secret": random.randint(low, top)}

        return draw_tasks("guess", split, count, seed, draw, decides=lambda data: [data["low"], data["high"]])

    async def open(self, task: Task) -> Reply:
        self.low, self.high, self.secret = task.data["low"], task.data["high"], task.data["secret"]
        self.left = self.guesses
        return Reply((Message("system", SYSTEM), Message("user", self.state if self.window else self.bounds)))

    async def step(self, message: Message) -> Reply:
        self.left -= 1
        found = NUMBER.search(message.content)
        if found and int(found.group()) == self.secret:
            return Reply(finished=True, outcome=1.0, marks={"guesses": self.guesses - self.left})
        if self.left <= 0:
            return Reply(finished=True, marks={"guesses": self.guesses})
        if not found:
            return self.observe("say a number")
        number = int(found.group())
        if number < self.secret:
            self.low = max(self.low, number + 1)
            return self.observe("higher")
        self.high = min(self.high, number - 1)
        return self.observe("lower")

    async def close(self) -> None:
        return None

    def observe(self, text: str) -> Reply:
        if not self.window:
            return Reply((Message("user", text),))
        observation = Message("user", f"{text}: {self.state}")
        return Reply((observation,), history=(Message("system", SYSTEM), observation))

    @property
    def bounds(self) -> str:
        return f"between {self.low} and {self.high}"

    @property
    def state(self) -> str:
        """All that decides a good guess."""
        return f"{self.bounds}, {self.left} left"

    def demonstrate(self, noise: float, random: Random) -> str:
        """Bisection; with probability `noise` any number between the bounds."""
        if random.random() < noise:
            return str(random.randint(self.low, self.high))
        return str((self.low + self.high) // 2)
