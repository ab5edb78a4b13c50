"""A server of the OpenEnv library with a small environment, which prints its port: openenv_server.py SESSIONS KIND."""

from __future__ import annotations

import random
import socket
import sys
from typing import Literal

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    text: str


class Place(Action):
    row: int
    column: int


class Shout(Action):
    text: str
    times: int = 1
    tone: Literal["soft", "loud"] = "soft"


class Seen(Observation):
    shown: str = ""


class Secret(Environment):
    """Say the secret letter; each wrong one is told to be before it or after it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.letter = "m"
        self.steps = 0

    def reset(self, seed=None, episode_id=None, **rest):
        self.letter = random.Random(seed).choice("abcdefghijklmnopqrstuvwxyz")
        self.steps = 0
        return Seen(shown="Which letter?")

    def step(self, action, timeout_s=None, **rest):
        self.steps += 1
        said = action.text.strip()
        if said == "crash":
            raise RuntimeError("it crashed")
        if said == self.letter:
            return Seen(shown="Yes.", reward=1.0, done=True)
        return Seen(shown=f"{'after' if said < self.letter else 'before'} {said}, step {self.steps}", reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.steps)


class Board(Secret):
    """An action with two fields."""

    def step(self, action, timeout_s=None, **rest):
        return Seen(shown=f"{action.row} {action.column}", reward=0.5, done=True)


class Echo(Secret):
    """An action with optional fields."""

    def step(self, action, timeout_s=None, **rest):
        self.steps += 1
        return Seen(shown=f"{action.tone} {action.text}" * action.times, reward=0.0, done=self.steps >= 4)


if __name__ == "__main__":
    sessions, kind = int(sys.argv[1]), sys.argv[2]
    environment, action = {"secret": (Secret, Say), "board": (Board, Place), "echo": (Echo, Shout)}[kind]
    app = create_fastapi_app(environment, action, Seen, max_concurrent_envs=sessions)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
