"""diverse: an environment for a policy that nobody warmed up. Whatever is said is answered, and the outcome is a coin
that the whole conversation decides: attempts that differ are paid differently, so no group is without an advantage."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from zlib import crc32

from pages import WORDS

from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.messages import Message
from turnwise.types import Task


class Diverse:
    """An attempt: `length` turns, each answered with words drawn for this task and turn.

    Example:
        user: the of it         assistant: xq zz
        user: is on as          assistant: ab         -> outcome 1 or 0
    """

    def __init__(self, words: tuple[int, int] = (4, 8), length: int = 8) -> None:
        """words: of an observation, at least and at most. length: turns of an attempt."""
        self.words = words
        self.length = length

    @staticmethod
    def tasks(split: str, seed: int, count: int = 2048) -> Iterator[Task]:
        """Different tasks: each has words of its own."""
        return draw_tasks("diverse", split, count, seed, lambda random: {"store": random.getrandbits(32)})

    async def open(self, task: Task) -> Reply:
        self.random = Random(task.data["store"])
        self.turns = 0
        self.coin = 0
        return Reply((Message("user", self.observation()),))

    async def step(self, message: Message) -> Reply:
        self.coin = crc32(message.content.encode(errors="replace"), self.coin)
        self.turns += 1
        if self.turns == self.length:
            return Reply(finished=True, outcome=float(self.coin % 2))
        return Reply((Message("user", self.observation()),))

    async def close(self) -> None:
        return None

    def observation(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(*self.words)))
