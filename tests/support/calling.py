"""Environments for tests of evaluations beside training: slow to open where held out, and watched."""

import asyncio
from dataclasses import dataclass, field

from turnwise.envs.base import Reply
from turnwise.envs.hops import Hops

HELDOUT = {task.id for task in Hops.tasks("heldout", 0, 64, (1, 2))}


@dataclass
class Watch:
    """What tests say and see."""

    opening_seconds: float = 5.0
    """Of held-out attempts."""
    hangs: bool = False
    """Whether held-out lookups are never answered."""
    paid: range = range(0)
    """Which held-out attempts succeed, whatever is said, by the order in which they open."""
    opened: int = 0
    """Held-out attempts so far."""
    training: int = 0
    """Attempts that are open now."""
    heldout: int = 0
    meanwhile: int = 0
    """Lookups of training while a held-out attempt was open."""
    calls: list[str] = field(default_factory=list)
    """Who stepped together, call by call: t in training, h held out."""

    @property
    def inside(self):
        return self.training + self.heldout


watch = Watch()


class Lookups(Hops):
    """Lookups that take a second."""

    async def open(self, task):
        self.is_heldout = task.id in HELDOUT
        if not self.is_heldout:
            watch.training += 1
            return await super().open(task)
        watch.heldout += 1
        self.number, watch.opened = watch.opened, watch.opened + 1
        await asyncio.sleep(watch.opening_seconds)
        return await super().open(task)

    async def step(self, message):
        await asyncio.sleep(1e9 if watch.hangs and self.is_heldout else 1.0)
        return await self.answer(message)

    async def answer(self, message):
        watch.meanwhile += not self.is_heldout and watch.heldout > 0
        if self.is_heldout and self.number in watch.paid:
            return Reply(finished=True, outcome=1.0)
        return await super().step(message)

    async def close(self):
        if self.is_heldout:
            watch.heldout -= 1
        else:
            watch.training -= 1


class LookupsTogether(Lookups):
    """The same, answered together."""

    @classmethod
    async def step_many(cls, environments, messages):
        watch.calls.append("".join("h" if own.is_heldout else "t" for own in environments))
        await asyncio.sleep(1.0)
        return [await own.answer(message) for own, message in zip(environments, messages, strict=True)]
