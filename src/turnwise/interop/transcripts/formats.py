"""The formats of transcripts by name, and how the format of a row is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.data.tables import Row, is_columnar, read_rows
from turnwise.interop.transcripts import art, atif, openai, sharegpt, trl, verifiers, verl
from turnwise.interop.transcripts.cell import Cell, ReadingNotes, printable
from turnwise.interop.transcripts.transcript import Transcript, check_writable


@dataclass(frozen=True, slots=True)
class TranscriptFormat:
    """How transcripts are read from the rows of another system, and written as such."""

    looks: Callable[[Cell], bool]
    """Whether a row looks like one of this format."""
    read: Callable[[Cell], list[Transcript]]
    """The transcripts of a row; ValueError with the place and the field where it cannot be read."""
    write: Callable[[Transcript], dict[str, Any]]
    """The row of a transcript; ValueError where the format cannot hold it."""
    loses: tuple[str, ...]
    """What a transcript loses that is written and read again: names in `transcript.LOSSES`."""


def format_of(module: Any) -> TranscriptFormat:
    return TranscriptFormat(module.looks, module.read, module.write, module.LOSES)


FORMATS: Mapping[str, TranscriptFormat] = {
    "atif": format_of(atif),
    "art": format_of(art),
    "sharegpt": format_of(sharegpt),
    "verl": format_of(verl),
    "verifiers": format_of(verifiers),
    "trl": format_of(trl),
    "openai": format_of(openai),
}
"""In the order in which a row is compared with them: the special before the general."""


def read_transcripts(source: str, name: str = "auto", notes: ReadingNotes | None = None) -> Iterator[Transcript]:
    """The transcripts in a file of JSON lines, JSON or Parquet, in a data set, or of a Python function.

    Example:
        list(read_transcripts("talks.jsonl"))
    """
    notes = notes if notes is not None else ReadingNotes()
    notes.columnar = is_columnar(source)
    for row in read_rows(source):
        yield from read_row(row, name, notes)


def read_row(row: Row, name: str = "auto", notes: ReadingNotes | None = None) -> list[Transcript]:
    """The transcripts of one row, in the format of this name or in that which the row has."""
    place, value = row
    cell = Cell(value, place, notes if notes is not None else ReadingNotes())
    if not isinstance(value, Mapping):
        cell.expected("an object")
    try:
        return (FORMATS[name] if name != "auto" else found_format(cell)).read(cell)
    except RecursionError:
        return cell.fail("is nested too deeply")


def found_format(row: Cell) -> TranscriptFormat:
    for each in FORMATS.values():
        if each.looks(row):
            return each
    fields = ", ".join(printable(field) for field in list(row.value)[:8]) or "none"
    return row.fail(
        f"is no transcript: it needs messages, conversations, or prompt and completion; its fields: {fields}"
    )


def write_row(transcript: Transcript, name: str) -> dict[str, Any]:
    """The row of a transcript in a format; ValueError with the reason where that cannot hold it."""
    check_writable(transcript)
    return FORMATS[name].write(transcript)


def as_columns(rows: Iterable[dict[str, Any]]) -> Any:
    """The Arrow table of rows. What has other fields in every row (arguments, tools, measurements) is JSON text."""
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

    return pa.Table.from_pylist([{name: as_column(value, name) for name, value in row.items()} for row in rows])


def as_column(value: Any, name: str) -> Any:
    if name in ("arguments", "tools", "metrics", "metadata", "info", "agent", "marks", "tool_definitions"):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return {key: as_column(part, key) for key, part in value.items()}
    return [as_column(part, "") for part in value] if isinstance(value, list) else value
