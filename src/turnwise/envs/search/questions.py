"""Questions about countries that take one to three searches of the World Factbook, and their answers.

A question is a chain. It ends with an attribute of a country ("the highest point of"). That country is named, or it is
what a link leads to ("the largest export partner of"), or a clue tells it ("the country whose capital is Suva").
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwise.data.factbook import COUNTRIES, Fields
from turnwise.envs.split import is_heldout

ALIASES = {
    "NZ": "New Zealand",
    "UAE": "United Arab Emirates",
    "UK": "United Kingdom",
    "US": "United States",
}
"""What texts call a country that has another name as a title."""

UNFOUND = frozenset(
    {
        "Capital Washington",
        "China Land boundaries",
        "Cote d'Ivoire Capital",
        "Guinea Area",
        "Guinea Land boundaries",
        "National anthem Patria",
        "Russia Land boundaries",
        "Saint Helena, Ascension, and Tristan da Cunha Capital",
    }
)
"""Queries whose answer is not among the first three passages of the index by words; no question needs them."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Something that a country's page says.

    Example:
        Relation("capital", "Capital", read_capital).of(countries["Fiji"]) == ("Suva",)
    """

    noun: str
    """What questions call it."""
    field: str
    """The field it is in, which is also what to search for."""
    read: Callable[[Mapping[str, str]], tuple[str, ...]]
    """The ways to say it, the best first, given the parts of the field; none where it cannot be told."""

    def of(self, country: Fields) -> tuple[str, ...]:
        return self.read(country.get(self.field, {}))


@dataclass(frozen=True, slots=True)
class Step:
    """One search of a chain: what is looked for, the query that finds it, what a passage says, and what that means.

    Example:
        Step("the largest export partner of Fiji", "Fiji Exports - partners", "US", "United States")
    """

    need: str
    query: str
    found: str
    means: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its answers and how an expert gets there.

    Example:
        Question("What is the internet country code of the country whose capital is Suva?", (".fj",), steps)
    """

    text: str
    answers: tuple[str, ...]
    steps: tuple[Step, ...]

    def to_json(self) -> dict[str, Any]:
        return {"question": self.text, "answers": list(self.answers), "steps": [asdict(step) for step in self.steps]}


# ---------------------------------------------------------------- what pages say


def matched(part: str, pattern: str, unit: str = "") -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    """Reads the group of a pattern at the beginning of a part; with a unit, the number is an answer by itself too."""
    compiled = re.compile(pattern)

    def read(parts: Mapping[str, str]) -> tuple[str, ...]:
        found = compiled.match(parts.get(part, ""))
        if not found or not found[1].strip():
            return ()
        value = found[1].strip()
        return (f"{value} {unit}", value) if unit else (value,)

    return read


def largest(part: str) -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    """Reads the name with the largest number, like "Germany 16.9%, Belgium 7.5%"."""

    def read(parts: Mapping[str, str]) -> tuple[str, ...]:
        sizes: dict[str, float] = {}
        for name, number in re.findall(r"([A-Z][A-Za-z.'\- ()]*?) ([\d,.]+)(?: km|%)", parts.get(part, "")):
            size = float(number.replace(",", "").rstrip(".") or 0)
            sizes[name.strip()] = max(sizes.get(name.strip(), 0.0), size)
        most = max(sizes.values(), default=0.0)
        first = [name for name, size in sizes.items() if size == most]
        return (first[0],) if len(first) == 1 else ()

    return read


ATTRIBUTES = (
    Relation("capital", "Capital", matched("name", r"([A-Z][A-Za-z.'\- ]+?)(?=$| \(|;|:|,)")),
    Relation("highest point", "Elevation extremes", matched("highest point", r"([A-Z][A-Za-z.'\- ]+?) [\d,.]+ m\b")),
    Relation("internet country code", "Internet country code", matched("", r"(\.[a-z]{2})(?=$|;| )")),
    Relation("currency code", "Exchange rates", matched("", r"[^(]+\(([A-Z]{3})\) per US dollar")),
    Relation("national anthem", "National anthem", matched("name", r'"([^"]+)"')),
    Relation("number of airports", "Airports", matched("", r"([\d,]+)(?= |$)")),
    Relation("length of the coastline", "Coastline", matched("", r"([\d,.]*[1-9][\d,.]*) km", "km")),
    Relation("total area", "Area", matched("total", r"([\d,.]+) sq km", "sq km")),
    Relation("median age", "Median age", matched("total", r"([\d.]+) years", "years")),
    Relation("date of independence", "Independence", matched("", r"(\d{1,2} [A-Z][a-z]+ \d{4})")),
)
CLUES = ATTRIBUTES[:5]
"""Attributes by which a country is told, where no other has the same."""
LINKS = (
    Relation("largest export partner", "Exports - partners", largest("")),
    Relation("largest import partner", "Imports - partners", largest("")),
    Relation("neighbour with the longest common border", "Land boundaries", largest("border countries")),
)


# ---------------------------------------------------------------- chains


@dataclass(frozen=True, slots=True)
class Country:
    """A country at the end of some steps, and what a question calls it."""

    name: str
    called: str
    steps: tuple[Step, ...] = ()
    passed: tuple[str, ...] = ()
    """The countries on the way to it."""

    def linked(self, link: Relation, found: str, name: str) -> Country:
        called = f"the {link.noun} of {self.called}"
        step = Step(f"the {link.noun} of {self.name}", f"{self.name} {link.field}", found, name)
        return Country(name, called, (*self.steps, step), (*self.passed, self.name))


class Atlas:
    """The countries of the World Factbook and all questions about them."""

    def __init__(self, countries: Mapping[str, Fields]) -> None:
        self.countries = {name: fields for name, fields in countries.items() if "Capital" in fields}
        self.owners = {clue.noun: self.unique(clue) for clue in CLUES}

    def unique(self, clue: Relation) -> dict[str, str]:
        """By country: what no other country has."""
        values = {name: clue.of(fields)[0] for name, fields in self.countries.items() if clue.of(fields)}
        counted = Counter(value.lower() for value in values.values())
        return {name: value for name, value in values.items() if counted[value.lower()] == 1}

    def questions(self, split: str, hops: int) -> Iterator[Question]:
        """All questions of a split that take so many searches. Those of the training split have no held-out country
        anywhere; the others ask about one."""
        for country, clue in self.reached(hops - 1):
            heldout = [is_heldout(f"country {name}") for name in (*country.passed, country.name)]
            if heldout[-1] if split == "heldout" else not any(heldout):
                for attribute in ATTRIBUTES:
                    if attribute.noun != clue and (answers := attribute.of(self.countries[country.name])):
                        question = asked(country, attribute, answers)
                        if UNFOUND.isdisjoint(step.query for step in question.steps):
                            yield question

    def reached(self, hops: int) -> Iterator[tuple[Country, str]]:
        """Countries after so many searches, each with the clue that tells it already ("" where there is none)."""
        if hops == 0:
            yield from ((Country(name, name), "") for name in self.countries)
            return
        if hops == 1:
            for clue in CLUES:
                for name, value in self.owners[clue.noun].items():
                    need = f"the country whose {clue.noun} is {value}"
                    yield Country(name, need, (Step(need, f"{clue.field} {value}", name, name),)), clue.noun
        for country, _ in self.reached(hops - 1):
            for link in LINKS:
                for found in link.of(self.countries[country.name]):
                    name = ALIASES.get(found, found)
                    if name in self.countries and name != country.name and name not in country.passed:
                        yield country.linked(link, found, name), ""


def asked(country: Country, attribute: Relation, answers: tuple[str, ...]) -> Question:
    need = f"the {attribute.noun} of {country.name}"
    step = Step(need, f"{country.name} {attribute.field}", answers[-1], answers[0])
    return Question(f"What is the {attribute.noun} of {country.called}?", answers, (*country.steps, step))


@lru_cache(maxsize=4)
def read_atlas(folder: Path) -> Atlas:
    """The atlas of a fetched World Factbook."""
    return Atlas(json.loads((folder / COUNTRIES).read_text(encoding="utf-8")))
