"""pages: an environment with a long history. Every action opens a page, and a page is 200 to 400 tokens long."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from turnwise.envs.base import Reply
from turnwise.envs.hops import NAMES
from turnwise.envs.split import draw_tasks
from turnwise.messages import Message
from turnwise.types import Task

SYSTEM = "Read on. Say open NAME."
WORDS = "the of and to in is on as at by it or an be we he so up no if my do go us".split()


class Pages:
    """An attempt: open one page after another, each of which names the next at its end, and come to the right one. It
    lasts as many turns as its trail has pages, whatever is said.

    Example:
        user: start with amber                  assistant: open amber
        user: amber: of it we ... next cedar    assistant: open cedar      -> outcome 1, where the trail has two pages
    """

    def __init__(self, words: tuple[int, int] = (200, 380), length: int = 8) -> None:
        """words: of a page, at least and at most. length: pages of a trail, and so turns of an attempt."""
        self.words = words
        self.length = length

    @staticmethod
    def tasks(split: str, seed: int, count: int = 2048) -> Iterator[Task]:
        """Different tasks: each has pages and a trail of its own."""
        return draw_tasks("pages", split, count, seed, lambda random: {"store": random.getrandbits(32)})

    async def open(self, task: Task) -> Reply:
        self.store: int = task.data["store"]
        ring = list(NAMES)
        Random(self.store).shuffle(ring)
        self.leads_to = dict(zip(ring, ring[1:] + ring[:1], strict=True))
        self.goal = ring[self.length - 1]
        self.wanted = ring[0]
        self.shown = ring[0]
        self.turns = 0
        return Reply((Message("system", SYSTEM), Message("user", f"start with {ring[0]}")))

    async def step(self, message: Message) -> Reply:
        """The page of a name that there is, or the last one again."""
        verb, _, name = message.content.strip().partition(" ")
        self.turns += 1
        found = verb == "open" and name in self.leads_to
        if self.turns == self.length:
            return Reply(finished=True, outcome=float(found and name == self.goal))
        if found:
            self.shown, self.wanted = name, self.leads_to[name]
        return Reply((Message("user", self.page(self.shown)),))

    async def close(self) -> None:
        return None

    def page(self, name: str) -> str:
        random = Random(f"{self.store}/{name}")
        words = random.choices(WORDS, k=random.randint(*self.words))
        return f"{name}: {' '.join(words)}. next {self.leads_to[name]}"

    def demonstrate(self, noise: float, random: Random) -> str:
        """What an expert says now; with probability `noise` any name."""
        name = random.choice(NAMES) if random.random() < noise else self.wanted
        return f"open {name}"
