"""Demonstrations: attempts by an environment's own expert through the agent loop, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from turnwise.engines.base import Sampling
from turnwise.engines.scripted import UNKNOWN, ScriptedEngine
from turnwise.envs.base import Environment
from turnwise.rollout.agent import Attempt, attempt
from turnwise.rollout.limits import Limits
from turnwise.rollout.render import Renderer
from turnwise.types import Group, Message, Status, StopReason, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """Attempts in which every action is what the environment's `demonstrate(noise, random)` says, or nothing."""

    environments: Mapping[str, Callable[[], Environment]]
    renderer: Renderer
    limits: Limits
    seed: int
    noise: float

    async def group(self, task: Task, visit: int) -> Group:
        """One demonstrated attempt; every visit to a task makes its mistakes elsewhere."""
        which = Attempt(self.seed, "demonstration", task, visit)
        random = Random(which.noise(0))
        environment: Any = None

        def make() -> Environment:
            nonlocal environment
            environment = self.environments[task.dataset]()
            return environment  # type: ignore[no-any-return]

        engine = ScriptedEngine(
            lambda prompt, session, seed: say(environment, self.noise, random),
            lambda text: self.renderer.encode(text).tolist(),
            end_token=self.renderer.end_token,
            logprob=UNKNOWN,
        )
        sampling = Sampling(max_tokens=self.limits.max_action_tokens)
        made = await attempt(which, make, engine, self.renderer, sampling, self.limits)
        if not made.status.counts:
            return Group(task, (), (made,))
        return Group(task, (made,))


def can_demonstrate(environment: object) -> bool:
    return callable(getattr(environment, "demonstrate", None))


def say(environment: Any, noise: float, random: Random) -> str:
    return str(environment.demonstrate(noise, random)) if can_demonstrate(environment) else ""


def read_demonstrations(path: Path) -> list[Task]:
    """Conversations from JSON lines, as tasks whose data is {"messages": [{"role": ..., "content": ...}, ...]}."""
    tasks = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read demonstrations from {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages = [Message(m["role"], m["content"]) for m in json.loads(line)["messages"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}} ({error})'
            ) from None
        if not any(message.role == "assistant" for message in messages[1:]):
            raise ValueError(f"{path}, line {number}: needs a message of the assistant after the first")
        tasks.append(Task(f"{path.name}:{number}", path.stem, {"messages": [[m.role, m.content] for m in messages]}))
    if not tasks:
        raise ValueError(f"{path} holds no demonstrations")
    return tasks


@dataclass(frozen=True, slots=True)
class Recital:
    """Trajectories out of recorded conversations: every message of the assistant is a turn."""

    renderer: Renderer

    async def group(self, task: Task, visit: int) -> Group:
        messages = tuple(Message(role, content) for role, content in task.data["messages"])
        turns: list[Turn] = []
        since = 0
        for place, message in enumerate(messages):
            if message.role != "assistant" or place == 0:
                continue
            prompt = (
                self.renderer.next(turns[-1], messages[:since], messages[:place])
                if turns
                else self.renderer.first(messages[:place])
            )
            action = np.append(self.renderer.encode(message.content), np.int32(self.renderer.end_token))
            size = len(action)
            turns.append(
                Turn(
                    prompt.tokens,
                    action,
                    np.full(size, UNKNOWN, np.float32),
                    np.zeros(size, np.int32),
                    StopReason.end_token,
                    reward=0.0,
                    said=message,
                    broke=prompt.broke,
                )
            )
            since = place
        return Group(task, (Trajectory(tuple(turns), Status.finished),))
