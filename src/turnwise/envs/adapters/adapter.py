"""What the adapters have in common: a library, a name in it, and tasks that are seeds."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from turnwise.envs.capabilities import can_demonstrate
from turnwise.envs.split import draw_tasks
from turnwise.messages import Message
from turnwise.types import Task


class Adapter:
    """One of a library's environments: an `Environment`, whose methods are plain functions where it is isolated. Where
    there is an expert, it demonstrates."""

    library: ClassVar[str] = ""
    """The module that must be there; empty where the library is somewhere else."""
    install: ClassVar[str] = 'pip install "turnwise[envs]"'
    """What to do where it is not."""
    example: ClassVar[str]
    """A name to try."""
    isolated: ClassVar[bool] = True
    """Whether attempts have processes of their own."""
    name: ClassVar[str] = ""
    """Which of the library's environments it is."""
    variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables that its process gets beside the usual ones."""
    task_fields: ClassVar[Mapping[str, Any]] = {}
    """What a task that a user gives must have, and of which type."""

    @classmethod
    def warm(cls) -> None:
        """Import what every attempt at this environment needs. Nothing may be drawn or opened here."""
        importlib.import_module(cls.library)

    @classmethod
    def demonstrates(cls) -> bool:
        """Whether there is an expert for this environment."""
        return can_demonstrate(cls)

    @classmethod
    def tasks(cls, split: str, seed: int, count: int = 1024) -> Iterator[Task]:
        """Different seeds for the library's own generator."""
        return draw_tasks(cls.name, split, count, seed, lambda random: {"seed": random.getrandbits(31)})

    def check(self) -> None:
        """ValueError where the library has no environment of this name, or makes none with these settings."""


class Registered(Adapter):
    """One of the environments in a library's own registry."""

    @classmethod
    def registry(cls) -> Mapping[str, Any]:
        found: Mapping[str, Any] = importlib.import_module(f"{cls.library}.envs.registration").ENV_REGISTRY
        return found

    @classmethod
    def warm(cls) -> None:
        if (entry := cls.registry().get(cls.name)) is not None:
            importlib.import_module(entry.entry_point.partition(":")[0])

    def check(self) -> None:
        if self.name not in self.registry():
            raise unknown(f"{self.library} has no environment", self.name, self.registry())


def unknown(what: str, name: str, names: Iterable[str]) -> ValueError:
    """The error for a name that a library does not know, with the nearest one that it does."""
    from turnwise.recipe.arguments import suggest  # with a library that no attempt needs

    return ValueError(f"{what} {name}{suggest(name, names)}")


def heard(text: str) -> tuple[Message, ...]:
    """What the environment says, as the model hears it; nothing where it says nothing."""
    return (Message("user", text.strip()),) if text.strip() else ()
