"""verifiers: environments that play themselves against a model they reach over HTTP, and so are agents here.

The library asks the endpoint for every message of the model's, and what it gets is what is recorded. It runs in a
Python of its own (verifiers_process.py), because the clients that it wants are other versions than ours. Its rewards
come to the attempt's outcome, and their parts and its metrics are marks.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from turnwise.envs.adapters.adapter import Adapter
from turnwise.envs.adapters.verifiers_process import Player, PlayerFailure, player_of
from turnwise.envs.base import Reply
from turnwise.envs.split import SPLITS, digest_of, is_heldout
from turnwise.messages import Message
from turnwise.types import Task

PAGE = 256
"""Rows that are read at a time."""
PLACE = "idx"
"""Where a row is in its taskset: all of it that is no content."""
INSTALL = (
    "python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers==0.4.*, and set "
    'env.settings.python = ".venv-verifiers/bin/python"'
)


class Verifiers(Adapter):
    """An episode, which the library plays.

    Example:
        env.name = "verifiers:addition"      a taskset that is installed beside the library
    """

    example = "verifiers:textarena"
    isolated = False

    def __init__(self, python: str = "", options: Mapping[str, Any] | None = None) -> None:
        """python: the interpreter that has the library; empty takes this one. options: what the library calls its
        `[env]` block: taskset and agent, or whatever roles the environment has."""

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        cls.player(**settings).check()

    @classmethod
    def player(cls, python: str = "", options: Mapping[str, Any] | None = None) -> Player:
        """The process that plays it, which need not run yet."""
        if not python and importlib.util.find_spec("verifiers") is None:
            raise ValueError(f"verifiers:{cls.name} needs a Python that has verifiers: {INSTALL}")
        found = shutil.which(python or sys.executable)
        if found is None:
            raise ValueError(f'env.settings.python = "{python}" is no program; {INSTALL}')
        return player_of(found, cls.name, json.dumps(options or {}, sort_keys=True), cls.variables)

    @classmethod
    def agent_for(cls, **settings: Any) -> Callable[..., Any]:
        """Who plays the attempts."""
        return cls.player(**settings).play

    @classmethod
    def tasks(
        cls, split: str, seed: int, count: int = 1024, settings: Mapping[str, Any] | None = None
    ) -> Iterator[Task]:
        """Rows of the taskset in its own order, at most `count` of them. What a row says, and not where it is, decides
        its split; rows that say the same are one task."""
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)}")
        seen: set[str] = set()
        for row in islice(
            rows_of(cls.player(**(settings or {}))), 1000 + 20 * count
        ):  # some never end, and repeat themselves
            if len(seen) == count:
                return
            digest = digest_of({name: value for name, value in row.items() if name != PLACE}).hex()
            if is_heldout(digest) == (split == "heldout") and digest not in seen:
                seen.add(digest)
                yield Task(f"{cls.name}-{digest}", cls.name, row)

    async def open(self, task: Task) -> Reply:
        """Nothing: what the model hears is up to the library."""
        return Reply()

    async def step(self, message: Message) -> Reply:
        """Pay what the library says an episode was worth."""
        try:
            said = json.loads(message.content)
            return Reply(finished=True, outcome=said["reward"], marks=said["marks"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PlayerFailure(f"verifiers:{self.name} did not say what an episode was worth: {error}") from None

    async def close(self) -> None:
        return None


def rows_of(player: Player) -> Iterator[dict[str, Any]]:
    """The rows of a taskset, which may have no end."""
    start = 0
    while page := player.rows(start, PAGE):
        yield from page
        start += len(page)
