"""Questions about countries that take one to three searches of the World Factbook, and their answers.

A question is a chain. It ends with an attribute of a country ("the highest point of"). The country is given by its
name, by a link from another country ("the largest export partner of"), or by a clue ("the country whose capital is
Suva").
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
"""Names of countries in texts that differ from the titles of their pages."""

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
"""Queries whose answer is not among the first three passages of the BM25 index; no question needs them."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact that a country's page has.

    Example:
        Relation("capital", "Capital", read_capital).of(countries["Fiji"]) == ("Suva",)
    """

    noun: str
    """Its name in questions."""
    field: str
    """The field of the page that has it; also part of the search query."""
    read: Callable[[Mapping[str, str]], tuple[str, ...]]
    """Returns the accepted wordings, the best first, from the parts of the field; none if the field lacks it."""

    def of(self, country: Fields) -> tuple[str, ...]:
        return self.read(country.get(self.field, {}))


@dataclass(frozen=True, slots=True)
class Step:
    """One search of a chain: the need, the query that satisfies it, the words in a passage, and their meaning.

    Example:
        Step("the largest export partner of Fiji", "Fiji Exports - partners", "US", "United States")
    """

    need: str
    query: str
    found: str
    means: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its answers and the searches of an expert.

    Example:
        Question("What is the internet country code of the country whose capital is Suva?", (".fj",), steps)
    """

    text: str
    answers: tuple[str, ...]
    steps: tuple[Step, ...]

    def to_json(self) -> dict[str, Any]:
        return {"question": self.text, "answers": list(self.answers), "steps": [asdict(step) for step in self.steps]}


# ---------------------------------------------------------------- reading pages


def matched(part: str, pattern: str, unit: str = "") -> Callable[[Mapping[str, str]], tuple[str, ...]]:
    """Reads the first group of a pattern at the start of a part; with a unit, the number alone is also an answer."""
    compiled = re.compile(pattern)

    def read(parts: Mapping[str, str]) -> tuple[str, ...]:
        match = compiled.match(parts.get(part, ""))
        if not match or not match[1].strip():
            return ()
        value = match[1].strip()
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
"""Attributes that identify a country if no other country has the same value."""
LINKS = (
    Relation("largest export partner", "Exports - partners", largest("")),
    Relation("largest import partner", "Imports - partners", largest("")),
    Relation("neighbour with the longest common border", "Land boundaries", largest("border countries")),
)


# ---------------------------------------------------------------- chains


@dataclass(frozen=True, slots=True)
class Country:
    """The country that some steps lead to, and its wording in a question."""

    name: str
    called: str
    steps: tuple[Step, ...] = ()
    passed: tuple[str, ...] = ()
    """The countries on the way to it."""

    def linked(self, link: Relation, wording: str, name: str) -> Country:
        called = f"the {link.noun} of {self.called}"
        step = Step(f"the {link.noun} of {self.name}", f"{self.name} {link.field}", wording, name)
        return Country(name, called, (*self.steps, step), (*self.passed, self.name))


class Atlas:
    """The countries of the World Factbook and all questions about them."""

    def __init__(self, countries: Mapping[str, Fields]) -> None:
        self.countries = {name: fields for name, fields in countries.items() if "Capital" in fields}
        self.owners = {clue.noun: self.unique(clue) for clue in CLUES}

    def unique(self, clue: Relation) -> dict[str, str]:
        """The values that only one country has, by country."""
        values = {name: clue.of(fields)[0] for name, fields in self.countries.items() if clue.of(fields)}
        counted = Counter(value.lower() for value in values.values())
        return {name: value for name, value in values.items() if counted[value.lower()] == 1}

    def questions(self, split: str, hops: int) -> Iterator[Question]:
        """All questions of a split that take `hops` searches. Training questions pass through no held-out country;
        held-out questions ask about one."""
        for country, clue in self.reached(hops - 1):
            heldout = [is_heldout(f"country {name}") for name in (*country.passed, country.name)]
            if heldout[-1] if split == "heldout" else not any(heldout):
                for attribute in ATTRIBUTES:
                    if attribute.noun != clue and (answers := attribute.of(self.countries[country.name])):
                        question = question_about(country, attribute, answers)
                        if UNFOUND.isdisjoint(step.query for step in question.steps):
                            yield question

    def reached(self, hops: int) -> Iterator[tuple[Country, str]]:
        """The countries that `hops` searches can reach, each with the clue that identifies it ("" if there is none)."""
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
                for wording in link.of(self.countries[country.name]):
                    name = ALIASES.get(wording, wording)
                    if name in self.countries and name != country.name and name not in country.passed:
                        yield country.linked(link, wording, name), ""


def question_about(country: Country, attribute: Relation, answers: tuple[str, ...]) -> Question:
    need = f"the {attribute.noun} of {country.name}"
    step = Step(need, f"{country.name} {attribute.field}", answers[-1], answers[0])
    return Question(f"What is the {attribute.noun} of {country.called}?", answers, (*country.steps, step))


@lru_cache(maxsize=4)
def read_atlas(folder: Path) -> Atlas:
    """The atlas of a downloaded World Factbook."""
    return Atlas(json.loads((folder / COUNTRIES).read_text(encoding="utf-8")))
