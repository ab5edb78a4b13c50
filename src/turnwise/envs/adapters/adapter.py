"""The part that all adapters share: a library, the name of an environment in it, and tasks that are seeds."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from turnwise.envs.capabilities import can_demonstrate
from turnwise.envs.split import draw_tasks
from turnwise.messages import Message
from turnwise.types import Task


class Adapter:
    """One environment of a library. It is an `Environment`; its methods are plain functions if it is isolated. It
    demonstrates if there is an expert."""

    library: ClassVar[str] = ""
    """The module that must be installed; empty if the library runs in another Python."""
    install: ClassVar[str] = 'pip install "turnwise[envs]"'
    """How to install it."""
    example: ClassVar[str]
    """A name that works, for error messages."""
    isolated: ClassVar[bool] = True
    """Whether each attempt runs in a separate process."""
    name: ClassVar[str] = ""
    """The name of the environment in the library."""
    variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables that its process gets besides the usual ones."""
    task_fields: ClassVar[Mapping[str, Any]] = {}
    """The fields that a user's task must have, with their types."""

    @classmethod
    def warm(cls) -> None:
        """Import the modules that every attempt needs. Do not open anything or draw random numbers here."""
        importlib.import_module(cls.library)

    @classmethod
    def demonstrates(cls) -> bool:
        """Whether there is an expert for this environment."""
        return can_demonstrate(cls)

    @classmethod
    def tasks(cls, split: str, seed: int, count: int = 1024) -> Iterator[Task]:
        """Different seeds for the library's generator."""
        return draw_tasks(cls.name, split, count, seed, lambda random: {"seed": random.getrandbits(31)})

    def check(self) -> None:
        """ValueError if the library has no environment of this name, or cannot make it with these settings."""


class Registered(Adapter):
    """One environment of a library that has a registry."""

    @classmethod
    def registry(cls) -> Mapping[str, Any]:
        registry: Mapping[str, Any] = importlib.import_module(f"{cls.library}.envs.registration").ENV_REGISTRY
        return registry

    @classmethod
    def warm(cls) -> None:
        if (entry := cls.registry().get(cls.name)) is not None:
            importlib.import_module(entry.entry_point.partition(":")[0])

    def check(self) -> None:
        if self.name not in self.registry():
            raise unknown(f"{self.library} has no environment", self.name, self.registry())


def unknown(problem: str, name: str, names: Iterable[str]) -> ValueError:
    """The error for a name that a library does not know. It suggests the nearest known name."""
    from turnwise.recipe.arguments import suggest  # imports pydantic, which no attempt needs

    return ValueError(f"{problem} {name}{suggest(name, names)}")


def user_message(text: str) -> tuple[Message, ...]:
    """The text of the environment as a user message; no message if the text is empty."""
    return (Message("user", text.strip()),) if text.strip() else ()
