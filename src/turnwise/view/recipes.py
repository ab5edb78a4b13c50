"""The recipes of several runs beside each other: which keys differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from turnwise.view.watched_run import WatchedRuns

VALUE_LENGTH = 300
UNINTERESTING = {"out"}
"""Keys that differ between any two runs."""


def recipe_table(runs: WatchedRuns) -> dict[str, Any]:
    """Every key that some run has, its value in each run, and whether they differ."""
    flat = {run.name: dict(flattened(run.reader.config)) for run in runs}
    keys = list(dict.fromkeys(key for values in flat.values() for key in values))
    rows = []
    for key in keys:
        values = [flat[run].get(key) for run in flat]
        differs = key not in UNINTERESTING and any(value != values[0] for value in values)
        rows.append({"key": key, "values": [value and value[:VALUE_LENGTH] for value in values], "differs": differs})
    return {"runs": list(flat), "rows": rows}


def flattened(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as JSON) of every leaf; lists of plain values are leaves."""
    if isinstance(value, dict) and value:
        for name, inside in value.items():
            yield from flattened(inside, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(inside, dict | list) for inside in value):
        for place, inside in enumerate(value):
            yield from flattened(inside, f"{key}[{place}]")
    elif key:
        yield key, json.dumps(value, ensure_ascii=False)
