"""Attempts of the environment search whose actions are known in advance, for env_batching.py.

The environment's expert writes them, with a mistake in every second turn; what the actions take is drawn. Searches go
to the real retrieval server over the real corpus. First: turnwise data factbook.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from turnwise.envs.search.env import Search
from turnwise.messages import Message
from turnwise.rollout.scene import Attempt
from turnwise.seeds import seed_of
from turnwise.types import Task

SPLIT = "heldout/sampled"
SLOTS = 4
NOISE = 0.5
MEDIAN, SIGMA = 0.1, 1.0
"""Seconds of an action."""


class Searches:
    """Attempts at held-out questions, one at each.

    Example:
        Searches(seed=0, attempts=128).tasks
    """

    max_turns = 10
    kind = Search

    def __init__(self, seed: int, attempts: int) -> None:
        self.make: Callable[[], Search] = partial(Search, topk=3, characters=2000)
        self.tasks: list[Task] = list(Search.tasks("heldout", seed, count=attempts, hops=(2, 3)))
        self.said: dict[str, list[tuple[float, str]]] = {}
        """(seconds, text) of every action, by session."""
        for task in self.tasks:
            random = Random(seed_of("searches", seed, task.id))
            texts = self.texts(task, random)
            seconds = [MEDIAN * math.exp(random.gauss(0, SIGMA)) for _ in texts]
            self.said[Attempt(seed, SPLIT, task).session] = list(zip(seconds, texts, strict=True))

    def texts(self, task: Task, random: Random) -> list[str]:
        environment, texts = self.make(), []
        environment.open(task)
        while len(texts) < self.max_turns:
            texts.append(environment.demonstrate(NOISE, random))
            if environment.step(Message("assistant", texts[-1])).finished:
                break
        return texts

    def sayer(self) -> Callable[[Any, str, int], Awaitable[str]]:
        """What an engine says and when, once."""
        left = {session: iter(said) for session, said in self.said.items()}

        async def say(prompt: Any, session: str, noise: int) -> str:
            seconds, text = next(left[session])
            await asyncio.sleep(seconds)
            return text

        return say

    def bound(self) -> float:
        """Seconds of the slowest attempt, if searches took none."""
        return max(sum(seconds for seconds, _ in said) for said in self.said.values())

    def server_seconds(self) -> float:
        """CPU seconds of the retrieval server so far."""
        process = getattr(self.make().service, "process", None)
        if process is None:
            return 0.0
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
