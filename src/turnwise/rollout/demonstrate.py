"""Demonstrations: attempts of an environment's expert through the agent loop, or conversations from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from turnwise.data.json_lines import numbered_lines
from turnwise.engines.base import Sampling
from turnwise.engines.scripted import UNKNOWN, ScriptedEngine
from turnwise.envs.base import Environment
from turnwise.envs.capabilities import can_demonstrate
from turnwise.messages import Message, ToolSpec
from turnwise.rollout.agent import play
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.limits import Limits
from turnwise.rollout.open_limit import with_open_limit
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Attempt, Play, Scene
from turnwise.runs.archive import read_step
from turnwise.tokens import Tokens
from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Demonstrator:
    """Makes attempts in which the environment's `demonstrate(noise, random)` writes every action."""

    environments: Mapping[str, Callable[[], Environment]]
    renderer: Renderer
    limits: Limits
    seed: int
    noise: float
    plays: Mapping[str, Play] = field(default_factory=dict)
    """By dataset: what makes the turns, if that is not the agent loop."""

    def __post_init__(self) -> None:
        makers = {label: with_open_limit(make) for label, make in self.environments.items()}
        object.__setattr__(self, "environments", makers)

    async def group(self, task: Task, epoch: int) -> Group:
        """One demonstrated attempt. The expert makes its mistakes elsewhere in every epoch."""
        which = Attempt(self.seed, "demonstration", task, epoch)
        random = Random(which.noise(0))
        environment: Any = None
        maker = with_open_limit(self.environments[task.dataset])

        def make() -> Environment:
            nonlocal environment
            environment = maker()
            return environment  # type: ignore[no-any-return]

        engine = ScriptedEngine(
            lambda prompt, session, seed: self.say(environment, random),
            lambda text: self.renderer.encode(text).tolist(),
            end_token=self.renderer.end_token,
            logprob=UNKNOWN,
        )
        scene = Scene(engine, self.renderer, Sampling(max_tokens=self.limits.max_action_tokens), self.limits)
        make_turns = self.plays.get(task.dataset, play)
        trajectory = await run_attempt(which, replace(maker, make=make), scene, make_turns)
        if not trajectory.status.counts:
            return Group(task, (), (trajectory,))
        return Group(task, (trajectory,))

    def say(self, environment: Any, random: Random) -> str | Tokens:
        """What the expert says now. The chat template writes a Message, with its tool calls."""
        said = environment.demonstrate(self.noise, random) if can_demonstrate(environment) else ""
        return self.renderer.action(said) if isinstance(said, Message) else str(said)


def read_demonstrations(path: Path) -> list[Task]:
    """Tasks from JSON lines {"messages": [{"role": ..., "content": ...}, ...]}, one conversation each. The content of
    an assistant message is the text that the model writes, tool calls included; "tools" may list the tools in OpenAI's
    form."""
    tasks = []
    for number, line in numbered_lines(path, "demonstrations from "):
        try:
            row = json.loads(line)
            messages = [Message(m["role"], m["content"]) for m in row["messages"]]
            tools = [tool_of(tool).schema for tool in row.get("tools", ())]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}} ({error})'
            ) from None
        if not any(message.role == "assistant" for message in messages[1:]):
            raise ValueError(f"{path}, line {number}: needs a message of the assistant after the first")
        data: dict[str, Any] = {"messages": [[m.role, m.content] for m in messages]}
        if tools:
            data["tools"] = tools
        tasks.append(Task(f"{path.name}:{number}", path.stem, data))
    if not tasks:
        raise ValueError(f"{path} holds no demonstrations")
    return tasks


def tool_of(schema: Mapping[str, Any]) -> ToolSpec:
    """A tool from OpenAI's form."""
    function = schema["function"]
    parameters = {"parameters": function["parameters"]} if "parameters" in function else {}
    return ToolSpec(function["name"], function.get("description", ""), **parameters)


class ArchivedDemonstrations:
    """Attempts of a file that the archive's `write_records` wrote, with the exact tokens that were sampled. Each
    attempt that counts is a demonstration.

    Example:
        archived = ArchivedDemonstrations(Path("models/best/attempts.parquet"))
        archived.group(archived.tasks[0])
    """

    def __init__(self, path: Path) -> None:
        attempts = [(record.group.task, one) for record in read_step(path) for one in record.group.trajectories]
        if not attempts:
            raise ValueError(f"{path} holds no attempt that counts")
        self.groups = {f"{path.name}:{number}": Group(task, (one,)) for number, (task, one) in enumerate(attempts)}
        self.tasks = [Task(name, path.stem) for name in self.groups]
        """One for each attempt."""

    def group(self, task: Task) -> Group:
        """The attempt that one of the tasks stands for."""
        return self.groups[task.id]


@dataclass(frozen=True, slots=True)
class RecordedDemonstrations:
    """Makes trajectories from recorded conversations: every assistant message becomes a turn."""

    renderer: Renderer

    async def group(self, task: Task, epoch: int) -> Group:
        messages = tuple(Message(role, content) for role, content in task.data["messages"])
        tools = tuple(map(tool_of, task.data.get("tools", ())))
        turns: list[Turn] = []
        last = 0
        for index, message in enumerate(messages):
            if message.role != "assistant" or index == 0:
                continue
            prompt = (
                self.renderer.next(turns[-1], messages[:last], messages[:index], tools, tools)
                if turns
                else self.renderer.first(messages[:index], tools)
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
            last = index
        return Group(task, (Trajectory(tuple(turns), Status.finished),))
