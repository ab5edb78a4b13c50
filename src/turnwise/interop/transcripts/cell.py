"""A value of a row with its place, so that a mistake in it can be named. Rows are hostile input."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from turnwise.types import LARGEST_PAY

KINDS = {dict: "an object", list: "a list", tuple: "a list", str: "text", bool: "true or false", int: "a number"}
KINDS |= {float: "a number", type(None): "nothing"}
DEEPEST = 64


@dataclass(slots=True)
class ReadingNotes:
    """What was seen and not read: fields that mean nothing to turnwise, by name, with the number of times."""

    ignored: Counter[str] = field(default_factory=Counter)
    columnar: bool = False
    """Whether rows come from Parquet or a data set, where a field that one row has is null in all others."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A value and where it stands.

    Example:
        Cell({"role": "user"}, "talks.jsonl, row 3", ReadingNotes()).need("role").text() == "user"
    """

    value: Any
    place: str
    notes: ReadingNotes
    path: str = ""

    def fail(self, why: str) -> NoReturn:
        where = f"{self.place}: {self.path}" if self.path else self.place
        raise ValueError(f"{where}: {why}")

    def expected(self, what: str) -> NoReturn:
        self.fail(f"needs to be {what}, got {KINDS.get(type(self.value), type(self.value).__name__)}")

    def at(self, name: str) -> Cell | None:
        """A field; None if it is absent or null."""
        if not isinstance(self.value, Mapping):
            self.expected("an object")
        found = self.value.get(name)
        return None if found is None else Cell(found, self.place, self.notes, f"{self.path}.{name}".lstrip("."))

    def need(self, name: str) -> Cell:
        return self.at(name) or self.fail(f"has no {name}")

    def has(self, *names: str) -> bool:
        return isinstance(self.value, Mapping) and all(self.value.get(name) is not None for name in names)

    def items(self) -> list[Cell]:
        if not isinstance(self.value, (list, tuple)):
            self.expected("a list")
        return [
            Cell(item, self.place, self.notes, f"{self.path}[{index}]".lstrip("."))
            for index, item in enumerate(self.value)
        ]

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.expected("text")
        self.check_text(self.value)
        return self.value

    def check_text(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("has half of a surrogate pair, which is no character")

    def number(self) -> float:
        """A finite number; a reward must fit the sums that are made of it."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            self.expected("a number")
        try:
            number = float(self.value)
        except OverflowError:
            number = math.inf
        if not abs(number) <= LARGEST_PAY:
            self.fail(f"needs to be a finite number up to {LARGEST_PAY:g}")
        return number

    def weight(self) -> bool:
        """Whether a message is trained: 0, 1, false or true."""
        if not isinstance(self.value, (bool, int, float)) or self.value not in (0, 1):
            self.fail("needs to be 0 or 1: a message is trained or not")
        return bool(self.value)

    def parsed(self) -> Cell:
        """The value in a JSON text, or the value itself where it is none."""
        if not isinstance(self.value, str):
            return self
        try:
            value = json.loads(self.value)
        except (ValueError, RecursionError):
            self.fail("is not JSON")
        return Cell(value, self.place, self.notes, self.path)

    def mapping(self) -> dict[str, Any]:
        """An object of JSON values; without the nulls that Parquet fills in."""
        found = self.parsed()
        if not isinstance(found.value, Mapping) or not all(isinstance(name, str) for name in found.value):
            found.expected("an object")
        is_filled = self.notes.columnar and not isinstance(self.value, str)
        plain = dict(found.value)
        return without_nulls(plain, self) if is_filled else plain

    def only(self, *names: str) -> None:
        """Note the fields besides these, which are not read."""
        if isinstance(self.value, Mapping):
            shape = self.path.translate(str.maketrans("", "", "0123456789"))
            for name, value in self.value.items():
                if name not in names and value is not None and value != [] and value != {}:
                    self.notes.ignored[f"{shape}.{printable(name)}".lstrip(".")] += 1


def printable(name: Any) -> str:
    """The name of a field in one short line."""
    text = str(name)[:60]
    return text if text.isprintable() else ascii(text)


def without_nulls(value: Any, cell: Cell, depth: int = 0) -> Any:
    """A value without fields that are null."""
    if depth > DEEPEST:
        cell.fail("is nested too deeply")
    if isinstance(value, Mapping):
        return {name: without_nulls(part, cell, depth + 1) for name, part in value.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(part, cell, depth + 1) for part in value]
    return value
