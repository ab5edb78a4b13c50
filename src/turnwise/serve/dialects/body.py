"""The JSON of a body, read strictly: what comes through holds text, finite numbers and each field once."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from turnwise.engines.base import shown
from turnwise.rollout.render.toolcalls import Fault, check_value

DEEPEST = 64
MOST_DIGITS = 300
"""Of a whole number; more is no number that other languages could read."""


class Unreadable(ValueError):
    """A text that is no JSON, or whose values nobody could pass on; `code` tells programs which."""

    def __init__(self, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.code = code


def read_value(text: str) -> Any:
    """The JSON value of a text."""
    try:
        value = DECODER.decode(text)
        check_value(value, DEEPEST)
    except Unreadable:
        raise
    except Fault as fault:
        raise Unreadable(str(fault)) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Unreadable(f"it is not JSON: {reason}", "invalid_json") from None
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; with a field twice, readers would not agree on what it says."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Unreadable(f"the field {shown(twice)} is there twice", "invalid_json")
    return found


def whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise Unreadable(f"a number of {len(text)} digits is out of range")
    return int(text)


def finite(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise Unreadable(f"the number {shown(text)} is out of range")
    return value


def constant(text: str) -> NoReturn:
    raise Unreadable(f"it is not JSON: there is no {text}", "invalid_json")


DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_int=whole, parse_float=finite, parse_constant=constant)
