"""Environments of the user in separate processes: `env.isolation.enabled = true` in a recipe.

Whatever such code does to its process (os._exit, a signal, an endless loop, all of the memory) then costs one attempt.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import resource
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from turnwise.envs.capabilities import (
    brings_agent,
    can_demonstrate,
    check_settings,
    closes_many,
    reads_calls,
    steps_many,
    task_fields_of,
)
from turnwise.envs.isolation.isolated import Isolated, check
from turnwise.envs.isolation.zygote import class_of
from turnwise.messages import Message
from turnwise.types import Task

TARGET = "turnwise.envs.isolation.user_environment:UserEnvironment"


@cache
def isolated_class(name: str, environment_class: Any, memory: int, variables: tuple[str, ...] = ()) -> type[Isolated]:
    """A class like the given one that runs each attempt in a process with that many MiB of memory and these environment
    variables besides the usual ones. `name` is its name in the recipe."""
    if issubclass(environment_class, Isolated) or brings_agent(environment_class):
        raise ValueError(f"env.isolation.enabled is ignored: {name} already runs in separate processes; remove it")
    if steps_many(environment_class) or closes_many(environment_class):
        raise ValueError(f"{name} combines calls in step_many, which env.isolation.enabled prevents; remove one")

    def __init__(self: Isolated, **settings: Any) -> None:
        Isolated.__init__(self, settings=settings, memory=memory)

    def check_in_process(**settings: Any) -> None:
        check(TARGET, name, json.dumps({"settings": settings, "memory": memory}), variables)

    members = {
        "__init__": __init__,
        "__signature__": inspect.signature(environment_class),
        "tasks": staticmethod(environment_class.tasks),
        "task_fields": task_fields_of(environment_class),
        "reads_calls": reads_calls(environment_class),
        "check_settings": staticmethod(check_in_process),
        "kind": type(environment_class.__name__, (UserEnvironment,), {"name": name, "variables": variables}),
        "target": TARGET,
    }
    if can_demonstrate(environment_class):
        members["demonstrate"] = Isolated.ask_expert
    return type(environment_class.__name__, (Isolated,), members)


# ---------------------------------------------------------------- in the process of an attempt


class UserEnvironment:
    """A user's environment in the process of an attempt. An event loop runs its coroutines, one call at a time."""

    name: ClassVar[str] = ""
    """Module and class."""

    @classmethod
    def warm(cls) -> None:
        class_of(cls.name)

    def __init__(self, settings: dict[str, Any], memory: int) -> None:
        limit_memory(memory)
        self.settings = settings
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.environment = class_of(self.name)(**settings)

    def check(self) -> None:
        check_settings(self.environment, self.settings)

    def open(self, task: Task) -> Any:
        return self.finished(self.environment.open(task))

    def step(self, message: Message) -> Any:
        return self.finished(self.environment.step(message))

    def close(self) -> Any:
        return self.finished(self.environment.close())

    def demonstrate(self, noise: float, random: Random) -> str | Message:
        message: str | Message = self.environment.demonstrate(noise, random)
        return message

    def finished(self, answer: Any) -> Any:
        return self.loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer


def limit_memory(mebibytes: int) -> None:
    """Let this process allocate at most that much more memory: it gets a MemoryError before the machine runs out."""
    status = Path("/proc/self/status")
    if not mebibytes or not status.exists():
        return
    [used] = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmData:")]
    limit = (int(used) << 10) + (mebibytes << 20)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
