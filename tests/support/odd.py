"""An adapter to a library that nobody should write, for tests of processes; imports nothing heavy."""

from __future__ import annotations

import os
import random
import signal
import sys

from turnwise.envs.adapters.adapter import Adapter
from turnwise.envs.base import Reply
from turnwise.messages import Message, ToolCall, ToolSpec
from turnwise.types import Task

TASK = Task("t-1", "odd", {"n": 3})
LEFT_BEHIND = []
"""Module state."""


class Odd(Adapter):
    """A library with module state and global random numbers, that crashes, hangs and lies when it is told to."""

    library = "random"
    name = "odd"

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor

    @classmethod
    def warm(cls):
        """This module is what is imported."""

    def check(self):
        if self.factor == 13:
            raise ValueError("thirteen is refused")
        if self.factor == 14:
            raise KeyError("fourteen")

    def open(self, task):
        LEFT_BEHIND.append(task.id)
        self.pid = os.getpid()
        return Reply(
            (Message("user", f"{len(LEFT_BEHIND)} {task.data['n'] * self.factor}"),), marks={"pid": os.getpid()}
        )

    def step(self, message):
        word = message.content
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "leave":
            os._exit(3)
        elif word == "hang":
            while True:
                pass
        elif word == "raise":
            raise KeyError("first line\nsecond line")
        elif word == "lie":
            return Reply((), reward=float("nan"))
        elif word == "variables":
            return Reply((Message("user", " ".join(f"{name}={value}" for name, value in os.environ.items())),))
        elif word == "quit":
            sys.exit(1)
        elif word == "draw":
            return Reply((Message("user", str([random.random(), random.randrange(1000)])),))
        elif word == "long":
            return Reply((Message("user", "x" * 3_000_000),))
        elif word == "all":
            tools = (ToolSpec("get", "d", {"type": "object", "properties": {"a": {"type": "integer"}}}),)
            history = (Message("assistant", "", "thought", (ToolCall("get", {"a": 1}),)),)
            return Reply((Message("user", "ü\ud800"),), 0.5, 0.25, False, {"m": 1.0}, history, ("\n",), tools)
        elif word == "calls":
            return Reply((Message("user", str([(call.name, dict(call.arguments)) for call in message.calls])),))
        return Reply((Message("user", word),), finished=word == "end")

    def close(self):
        return Reply(outcome=0.5)

    def demonstrate(self, noise, random):
        return "hang" if noise == 1.0 else f"{random.random():.3f}"
