"""Strict parsing of JSON bodies: valid text, finite numbers, and each field once."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from turnwise.engines.base import shown
from turnwise.rollout.render.toolcalls import Fault, check_value

DEEPEST = 64
MOST_DIGITS = 300
"""The most digits of an integer; other languages could not read a longer one."""


class Unreadable(ValueError):
    """The text is not JSON, or a value in it cannot be passed on. `code` says which, for programs."""

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
    """An object without repeated fields: JSON readers disagree on which value of a repeated field counts."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise Unreadable(f"the field {shown(twice)} occurs twice", "invalid_json")
    return fields


def integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise Unreadable(f"a number of {len(text)} digits is out of range")
    return int(text)


def finite(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise Unreadable(f"the number {shown(text)} is out of range")
    return value


def constant(text: str) -> NoReturn:
    raise Unreadable(f"it is not JSON: {text} is not a JSON value", "invalid_json")


DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_int=integer, parse_float=finite, parse_constant=constant)
