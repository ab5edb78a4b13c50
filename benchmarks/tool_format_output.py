"""An output of a public test, the calls that the test states, and whether a reading meets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tool_format_fixtures import same

Calls = list[tuple[str, Any]]
"""(name, arguments) of each call; arguments that are no JSON stay text."""


@dataclass
class Wanted:
    """What a test states of one call. None where it says nothing."""

    name: str | None = None
    arguments: Any = None
    some: dict[str, Any] = field(default_factory=dict)
    """Arguments by key, where the test does not state all of them."""
    count: int | None = None
    parts: tuple[str, ...] = ()
    """What the JSON of the arguments, without spaces between its parts, has in it."""
    checks: tuple[Callable[[Any], bool], ...] = ()
    """What else the test asks of the arguments."""

    def met_by(self, name: str, arguments: Any) -> bool:
        if self.name is not None and name != self.name:
            return False
        if self.arguments is not None and not same(arguments, self.arguments):
            return False
        if not all(check(arguments) for check in self.checks):
            return False
        given = arguments if isinstance(arguments, dict) else {}
        if self.count is not None and len(given) != self.count:
            return False
        text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        if not all(part in text for part in self.parts):
            return False
        return all(key in given and same(given[key], value) for key, value in self.some.items())


@dataclass
class Output:
    """An output of a test. `parser` is the project's own name for the parser that the test is about."""

    project: str
    test: str
    parser: str
    format: str
    text: str
    tools: list[dict[str, Any]]
    wanted: list[Wanted]

    @property
    def key(self) -> str:
        return "\0".join([self.format, self.text, json.dumps(self.tools, sort_keys=True)])

    def met_by(self, calls: Calls) -> bool:
        return len(calls) == len(self.wanted) and all(
            one.met_by(name, arguments) for one, (name, arguments) in zip(self.wanted, calls, strict=True)
        )

    def stated(self) -> str:
        return str(
            [(one.name, one.arguments if one.arguments is not None else one.some or one.parts) for one in self.wanted]
        )


def tool_of(name: str, parameters: Any = None) -> dict[str, Any]:
    """A tool; without a schema it declares no arguments."""
    given = parameters if isinstance(parameters, dict) else {}
    return {"name": name, "parameters": {"type": "object", "properties": {}} | given}


def offered(tools: list[dict[str, Any]], wanted: Sequence[Wanted]) -> list[dict[str, Any]]:
    """The tools of a test; without any, those of the names that it expects."""
    return tools or [tool_of(name) for name in dict.fromkeys(one.name for one in wanted if one.name)]
