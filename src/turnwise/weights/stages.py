"""The stages of a load, and how long each takes: whoever does one names it, whoever wants to know listens.

Stages are done by transports and engines, in threads and tasks that a load starts; no value passes through all of them,
so the listener is in the context that they inherit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

NAMES = ("gather", "write", "transfer", "swap", "check")
"""gather: the learner gets its weights ready. write: they are put where engines read them, while these sample on. swap:
engines take them and sample nothing; transfer is that part of it in which vLLM's workers read or receive them. check:
engine and learner are compared."""


class LoadStages:
    """Wall-clock seconds by stage; what is done at the same time counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.since: dict[str, tuple[int, float]] = {}
        """Of the stages under way: how often, and since when."""
        self.lock = Lock()

    def begin(self, name: str) -> None:
        with self.lock:
            count, since = self.since.get(name, (0, time.perf_counter()))
            self.since[name] = count + 1, since

    def end(self, name: str) -> None:
        with self.lock:
            count, since = self.since.pop(name)
            if count > 1:
                self.since[name] = count - 1, since
            else:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since

    @property
    def metrics(self) -> dict[str, float]:
        return {f"seconds/load/{name}": self.seconds.get(name, 0.0) for name in NAMES}


LISTENER: ContextVar[LoadStages | None] = ContextVar("load stages", default=None)


@contextmanager
def listening() -> Iterator[LoadStages]:
    """The seconds of all stages that are done inside."""
    stages = LoadStages()
    token = LISTENER.set(stages)
    try:
        yield stages
    finally:
        LISTENER.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Do a stage, for whoever listens."""
    assert name in NAMES
    listener = LISTENER.get()
    if listener is None:
        yield
        return
    listener.begin(name)
    try:
        yield
    finally:
        listener.end(name)
