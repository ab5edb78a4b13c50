"""The tables of attempts and groups: filters and order as the page writes them, one page of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from turnwise.inspect.attempts import Query
from turnwise.view.clipped import number
from turnwise.view.watched_run import WatchedRun

LARGEST_PAGE = 500
WHOLE = ("first_step", "last_step", "min_turns", "max_turns", "min_tokens", "max_tokens")
REAL = ("min_reward", "max_reward")
TEXT = ("kind", "task", "dataset", "order")


def query_of(parameters: Mapping[str, str]) -> Query:
    """The query that the parameters of an address ask for; those that are empty or of others are left out."""
    chosen: dict[str, Any] = {}
    for field in fields(Query):
        text = parameters.get("status" if field.name == "statuses" else field.name, "")
        if not text:
            continue
        if field.name == "statuses":
            chosen["statuses"] = tuple(text.split(","))
        elif field.name in WHOLE:
            chosen[field.name] = whole_number(field.name, text)
        elif field.name in REAL:
            chosen[field.name] = real_number(field.name, text)
        elif field.name in TEXT:
            chosen[field.name] = text
        else:
            chosen[field.name] = text == "1"
    return Query(**chosen)


def whole_number(name: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 15:
        raise ValueError(f"{name} is a whole number, not {text[:40]!r}")
    return int(text)


def real_number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} is a number, not {text[:40]!r}")
    return value


def place_of(parameters: Mapping[str, str]) -> tuple[int, int]:
    """(rows before the page, rows of the page)."""
    offset = whole_number("offset", parameters.get("offset") or "0")
    limit = whole_number("limit", parameters.get("limit") or "50")
    return max(0, offset), min(max(1, limit), LARGEST_PAGE)


def attempts_table(run: WatchedRun, parameters: Mapping[str, str]) -> dict[str, Any]:
    """One page of attempts, how many there are, and how many of each kind, status and dataset."""
    attempts, query = run.reader.attempts, query_of(parameters)
    page = attempts.select(query, *place_of(parameters))
    rows = [asdict(row) | {"key": str(row.key), "reward": number(row.reward)} for row in page.rows]
    return {"total": page.total, "rows": rows, **state_of(run), "choices": attempts.counts(Query())}


def groups_table(run: WatchedRun, parameters: Mapping[str, str]) -> dict[str, Any]:
    """One page of the groups that the attempts of a query belong to."""
    attempts, query = run.reader.attempts, query_of(parameters)
    total, groups = attempts.groups(query, *place_of(parameters))
    rows = [
        {name: number(value) if isinstance(value, float) else value for name, value in group.items()}
        | {"key": f"{group['kind']}/{group['step']}/{group['group']}"}
        for group in groups
    ]
    return {"total": total, "rows": rows, **state_of(run), "choices": attempts.counts(Query())}


def state_of(run: WatchedRun) -> dict[str, Any]:
    """How much of the run the table has."""
    attempts = run.reader.attempts
    return {"indexed": len(attempts), "waiting_files": attempts.num_waiting}
