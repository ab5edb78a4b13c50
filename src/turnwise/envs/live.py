"""Environments that a Python session gives as classes, under names that no module has.

A recipe names its environments. A class of a notebook has no name that another process could import, so it gets one
that begins with "live:", which means something only while the session lends the class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

PREFIX = "live"
LENT: ContextVar[Mapping[str, Any]] = ContextVar("lent environments", default=MappingProxyType({}))
"""By name in a recipe: the classes that are lent to what runs in this context. Two runs at once may lend other classes
under one name."""


def live_name(label: str) -> str:
    return f"{PREFIX}:{label}"


def is_live(name: str) -> bool:
    """Whether a name in a recipe means a class of a Python session."""
    return name.partition(":")[0] == PREFIX


@contextmanager
def lent(classes: Mapping[str, Any]) -> Iterator[None]:
    """Lend classes under their names in a recipe."""
    token = LENT.set({**LENT.get(), **classes})
    try:
        yield
    finally:
        LENT.reset(token)


def live_class(name: str) -> Any:
    """The class that is lent under a name."""
    if name not in LENT.get():
        label = name.partition(":")[2]
        raise ValueError(
            f'env.name = "{name}" is a class of a Python session; go on in Python with environment={label}, as in '
            f"turnwise.train(resume=..., environment={label})"
        )
    return LENT.get()[name]


def refuse_processes(name: str, key: str) -> None:
    """Refuse a setting that has other processes import the environment, where it is a class of this session."""
    if is_live(name):
        raise ValueError(
            f"{key} has other processes import the environment, and {name.partition(':')[2]} is a class of this "
            "session; put it into a module, or remove that"
        )
