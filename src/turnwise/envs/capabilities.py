"""What a class of environments may offer beyond `open`, `step` and `close`.

Each capability is a protocol that the class (not an instance) fulfils by having the member; the functions below are the
only place that asks for one.

| member of the class                    | protocol       | what it means                                             |
|----------------------------------------|----------------|-----------------------------------------------------------|
| `tasks(split, seed, ...)`              | MakesTasks     | the tasks of "train" or "heldout", which share none; with |
|                                        |                | a parameter `settings` it gets those of the constructor.  |
|                                        |                | Required; skipped where a recipe has `env.data`           |
| `demonstrate(self, noise, random)`     | Demonstrates   | what an expert would say now; makes warm starts possible  |
| `task_fields = {"question": str, ...}` | TypesTasks     | fields that the data of a task must have: tasks that a    |
|                                        |                | user gives are checked against them; "a|b" is either      |
| `check_settings(**settings)`           | ChecksSettings | classmethod; refuses settings before a run starts         |
| `reads_calls = True`                   | ReadsCalls     | needs a recipe that says how tool calls are written       |
| `agent_for(**settings)`                | BringsAgent    | classmethod; the environment brings the agent that        |
|                                        |                | `env.agent` would name, and makes the model calls itself  |
| `step_many(environments, messages)`    | StepsMany      | classmethod; one call steps several environments (a       |
|                                        |                | judge, a reward model): list[Reply or Exception]          |
| `close_many(environments)`             | ClosesMany     | classmethod; one call closes several: list[Reply or None  |
|                                        |                | or Exception]                                             |
| `idempotent = True`                    | Retries        | a batched call that raised may be made again, one         |
|                                        |                | environment at a time                                     |
| `costs_process = True`                 | CostsProcess   | every attempt is a process: the default number of open    |
|                                        |                | environments then depends on the cores of the machine     |
| `models(**settings)`                   | HasSeats       | classmethod; names the model of each seat of a game:      |
|                                        |                | "policy", "frozen" or "frozen:FOLDER". With more than one |
|                                        |                | seat, replies have `seats`                                |
| `heldout_settings(**settings)`         | DiffersHeldOut | classmethod; the settings of held-out attempts and of     |
|                                        |                | demonstrations, which have one seat                       |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, ClassVar, Protocol, TypeGuard, runtime_checkable

from turnwise.envs.base import Environment
from turnwise.messages import Message
from turnwise.types import Task


@runtime_checkable
class MakesTasks(Protocol):
    @property
    def tasks(self) -> Callable[..., Iterable[Task]]: ...


@runtime_checkable
class Demonstrates(Protocol):
    def demonstrate(self, noise: float, random: Random) -> str | Message: ...


@runtime_checkable
class TypesTasks(Protocol):
    task_fields: ClassVar[Mapping[str, Any]]


@runtime_checkable
class ChecksSettings(Protocol):
    def check_settings(self, **settings: Any) -> None: ...


@runtime_checkable
class ReadsCalls(Protocol):
    reads_calls: ClassVar[bool]


@runtime_checkable
class BringsAgent(Protocol):
    def __call__(self, **settings: Any) -> Any: ...

    def agent_for(self, **settings: Any) -> Callable[..., Any]: ...


@runtime_checkable
class StepsMany(Protocol):
    def step_many(self, environments: Sequence[Environment], messages: Sequence[Message]) -> Any: ...


@runtime_checkable
class ClosesMany(Protocol):
    def close_many(self, environments: Sequence[Environment]) -> Any: ...


@runtime_checkable
class Retries(Protocol):
    idempotent: ClassVar[bool]


@runtime_checkable
class CostsProcess(Protocol):
    costs_process: ClassVar[bool]


@runtime_checkable
class HasSeats(Protocol):
    def models(self, **settings: Any) -> tuple[str, ...]: ...


@runtime_checkable
class DiffersHeldOut(Protocol):
    def heldout_settings(self, **settings: Any) -> dict[str, Any]: ...


def makes_tasks(kind: Any) -> bool:
    return isinstance(kind, MakesTasks) and callable(kind.tasks)


def can_demonstrate(kind: Any) -> TypeGuard[Demonstrates]:
    """Whether a class of environments, or one of them, has an expert."""
    return isinstance(kind, Demonstrates) and callable(kind.demonstrate)


def task_fields_of(kind: Any) -> Mapping[str, Any]:
    """The fields that the data of a task must have, with their types; empty if the class does not say."""
    return kind.task_fields if isinstance(kind, TypesTasks) else {}


def check_settings(kind: Any, settings: Mapping[str, Any]) -> None:
    """ValueError if the class, or one of its environments, refuses these settings."""
    if isinstance(kind, ChecksSettings) and callable(kind.check_settings):
        kind.check_settings(**settings)


def reads_calls(kind: Any) -> bool:
    return isinstance(kind, ReadsCalls) and bool(kind.reads_calls)


def brings_agent(kind: Any) -> TypeGuard[BringsAgent]:
    return isinstance(kind, BringsAgent)


def steps_many(kind: Any) -> TypeGuard[StepsMany]:
    return isinstance(kind, StepsMany)


def closes_many(kind: Any) -> TypeGuard[ClosesMany]:
    return isinstance(kind, ClosesMany)


def is_batchable(kind: Any) -> bool:
    """Whether one call can serve several environments of a class; ValueError if it says so with a plain method."""
    names = [name for name, has in (("step_many", steps_many(kind)), ("close_many", closes_many(kind))) if has]
    for name in names:
        if not isinstance(inspect.getattr_static(kind, name), (classmethod, staticmethod)):
            raise ValueError(f"{kind.__name__}.{name} serves several environments; make it a classmethod")
    return bool(names)


def is_idempotent(kind: Any) -> bool:
    return isinstance(kind, Retries) and bool(kind.idempotent)


def costs_process(kind: Any) -> bool:
    return isinstance(kind, CostsProcess) and bool(kind.costs_process)


def models_of(kind: Any, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The model that plays each seat: the policy alone, unless an environment is a game of several seats."""
    return tuple(kind.models(**settings)) if isinstance(kind, HasSeats) else ("policy",)


def heldout_settings_of(kind: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of held-out attempts."""
    return kind.heldout_settings(**settings) if isinstance(kind, DiffersHeldOut) else dict(settings)
