"""Environments that pay otherwise than hops for the same messages, or misbehave, for tests of rescoring."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from turnwise.envs.base import Reply
from turnwise.envs.hops import Hops
from turnwise.messages import Message
from turnwise.types import Task


class Generous(Hops):
    """Pays twice as much, and a bonus at the end."""

    async def step(self, message: Message) -> Reply:
        reply = await super().step(message)
        return replace(reply, reward=2 * reply.reward, marks={"generous": 1.0})

    async def close(self) -> Reply | None:  # type: ignore[override]
        return Reply(outcome=0.125)


class Wordy(Hops):
    """Answers with other words."""

    async def step(self, message: Message) -> Reply:
        reply = await super().step(message)
        return replace(reply, messages=tuple(replace(m, content=f"well, {m.content}") for m in reply.messages))


class Reworded(Hops):
    """Asks with other words."""

    async def open(self, task: Task) -> Reply:
        reply = await super().open(task)
        return replace(reply, messages=tuple(replace(m, content=f"please {m.content}") for m in reply.messages))


class Endless(Hops):
    """Never finishes."""

    async def step(self, message: Message) -> Reply:
        return replace(await super().step(message), finished=False)


class Hasty(Hops):
    """Finishes after the first turn."""

    async def step(self, message: Message) -> Reply:
        return replace(await super().step(message), finished=True, messages=())


class Choosy(Hops):
    """Refuses half of the tasks."""

    async def open(self, task: Task) -> Reply:
        if task.data["store"] % 2:
            raise ValueError("this store is closed\x1b[2J")
        return await super().open(task)


class Raising(Hops):
    async def step(self, message: Message) -> Reply:
        raise RuntimeError("the reward model is away")


class Hanging(Hops):
    async def step(self, message: Message) -> Reply:
        await asyncio.sleep(3600)
        raise AssertionError


class Stubborn(Hops):
    """Takes a setting that hops does not."""

    def __init__(self, bonus: float = 0.0) -> None:
        super().__init__()
        self.bonus = bonus

    async def close(self) -> Reply | None:  # type: ignore[override]
        return Reply(outcome=self.bonus)
