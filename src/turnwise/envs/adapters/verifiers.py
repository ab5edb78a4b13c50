"""verifiers: environments that call a model over HTTP themselves. Here they are agents behind the endpoint.

The library gets every message of the model from the endpoint, and the endpoint records it. The library runs in a
separate Python (verifiers_process.py) because it needs other versions of HTTP clients. Its reward is the outcome of the
attempt; the parts of the reward and the metrics are marks.
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
"""How many rows are read at a time."""
PLACE = "idx"
"""The field of a row with its index in the taskset: the only field that is not content."""
INSTALL = (
    "python -m venv .venv-verifiers && .venv-verifiers/bin/pip install verifiers==0.4.*, and set "
    'env.settings.python = ".venv-verifiers/bin/python"'
)


class Verifiers(Adapter):
    """An episode that the library plays.

    Example:
        env.name = "verifiers:addition"      a taskset that is installed in the same Python as the library
    """

    example = "verifiers:textarena"
    isolated = False

    def __init__(self, python: str = "", options: Mapping[str, Any] | None = None) -> None:
        """python: the interpreter that has the library; empty takes this one. options: the library's `[env]` block:
        taskset and agent, or other roles that the environment has."""

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        cls.player(**settings).check()

    @classmethod
    def player(cls, python: str = "", options: Mapping[str, Any] | None = None) -> Player:
        """The player of this environment. Its process starts with the first call."""
        if not python and importlib.util.find_spec("verifiers") is None:
            raise ValueError(f"verifiers:{cls.name} needs a Python that has verifiers: {INSTALL}")
        program = shutil.which(python or sys.executable)
        if program is None:
            raise ValueError(f'env.settings.python = "{python}" is not a program; {INSTALL}')
        return player_of(program, cls.name, json.dumps(options or {}, sort_keys=True), cls.variables)

    @classmethod
    def agent_for(cls, **settings: Any) -> Callable[..., Any]:
        """The function that plays an attempt."""
        return cls.player(**settings).play

    @classmethod
    def tasks(
        cls, split: str, seed: int, count: int = 1024, settings: Mapping[str, Any] | None = None
    ) -> Iterator[Task]:
        """Rows of the taskset in their order, at most `count`. The content of a row decides its split, not its index;
        rows with equal content are one task."""
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; choose one of {', '.join(SPLITS)}")
        digests: set[str] = set()
        # Some tasksets never end and repeat their rows.
        for row in islice(rows_of(cls.player(**(settings or {}))), 1000 + 20 * count):
            if len(digests) == count:
                return
            digest = digest_of({name: value for name, value in row.items() if name != PLACE}).hex()
            if is_heldout(digest) == (split == "heldout") and digest not in digests:
                digests.add(digest)
                yield Task(f"{cls.name}-{digest}", cls.name, row)

    async def open(self, task: Task) -> Reply:
        """An empty reply: the library writes the prompts."""
        return Reply()

    async def step(self, message: Message) -> Reply:
        """Pay the reward that the library gave the episode."""
        try:
            result = json.loads(message.content)
            return Reply(finished=True, outcome=result["reward"], marks=result["marks"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PlayerFailure(f"verifiers:{self.name} ended an episode without a reward: {error}") from None

    async def close(self) -> None:
        return None


def rows_of(player: Player) -> Iterator[dict[str, Any]]:
    """The rows of a taskset; there may be infinitely many."""
    start = 0
    while page := player.rows(start, PAGE):
        yield from page
        start += len(page)
