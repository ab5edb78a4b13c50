"""An environment that is slow and fails, for tests of asynchronous runs."""

import asyncio
from random import Random

from turnwise.envs.hops import Hops


class Slow(Hops):
    """Lookups that take seconds, times `pace`, sometimes fail and sometimes never answer."""

    def __init__(self, pace: float = 1.0, **settings):
        super().__init__(**settings)
        self.pace = pace

    async def open(self, task):
        self.random = Random(task.data["store"])
        return await super().open(task)

    async def step(self, message):
        chance = Random(f"{self.random.random()} {message.content}")
        await asyncio.sleep(self.pace * chance.lognormvariate(0.0, 1.0))
        fate = chance.random()
        if fate < 0.03:
            raise RuntimeError("the store is down")
        if fate < 0.05:
            await asyncio.sleep(10_000 * self.pace)
        return await super().step(message)
