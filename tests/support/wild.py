"""An environment that nobody should have in the process of a run, for tests of isolation."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task


class Wild:
    """Does what it is told to."""

    def __init__(self, greeting: str = "go") -> None:
        self.greeting = greeting

    @staticmethod
    def tasks(split: str, seed: int, count: int = 4):
        return [Task(f"{split}-{number}", "wild", {}) for number in range(count)]

    async def open(self, task):
        await asyncio.sleep(0)
        return Reply((Message("user", self.greeting),))

    async def step(self, message):
        await asyncio.sleep(0)
        getattr(self, message.content, lambda: None)()
        return Reply((Message("user", f"on {os.getpid()}"),), finished=True, outcome=1.0)

    def close(self):
        return None

    def demonstrate(self, noise, random):
        return "fine"

    def leave(self):
        os._exit(0)

    def stop(self):
        asyncio.get_running_loop().stop()
        asyncio.get_running_loop().close()

    def quit(self):
        sys.exit(0)

    def interrupt(self):
        raise KeyboardInterrupt

    def crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def hang(self):
        while True:
            pass

    def sleep(self):
        time.sleep(1000)

    def bomb(self):
        held = []
        while True:
            held.append(bytearray(16 << 20))
