"""Routes as columns of the archive: the bytes of an attempt's routes, and how many each of its turns has.

A file has these columns only where some turn has routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnwise.routes import Routes, pack_routes
from turnwise.runs.columns import list_column, number_column
from turnwise.types import Trajectory

BYTES, COUNTS, SIZES = "routes", "routes_per_turn", ("route_bytes", "route_layers", "route_experts")
"""The numbers of experts one after another; routes of each turn, -1 where it has None; bytes of a number, layers, and
experts of a token, 0 where an attempt has no routes."""
DTYPES = {1: np.uint8, 2: np.uint16}


def route_columns(attempts: Sequence[Trajectory]) -> dict[str, Any]:
    """The columns of attempts; none where no turn has routes."""
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

    if all(turn.routes is None for attempt in attempts for turn in attempt.turns):
        return {}
    packed = [pack_routes(attempt.turns) for attempt in attempts]
    sizes = [(0, 0, 0) if routes is None else (routes.itemsize, *routes.shape[1:]) for routes, _ in packed]
    counts = np.concatenate([np.zeros(0, np.int32), *(np.array(of_turns, np.int32) for _, of_turns in packed)])
    return {
        BYTES: pa.array([bytes_of(routes) for routes, _ in packed], pa.large_binary()),
        COUNTS: list_column([len(of_turns) for _, of_turns in packed], pa.array(counts.astype(np.int32))),
        **{name: number_column((size[place] for size in sizes), np.int32) for place, name in enumerate(SIZES)},
    }


def read_routes(column: Mapping[str, Any], num_rows: int) -> list[tuple[Routes | None, list[int]] | None]:
    """Inverse of `route_columns`: what `unpack_routes` reads, one entry per row."""
    if BYTES not in column:
        return [None] * num_rows
    found: list[tuple[Routes | None, list[int]] | None] = []
    sizes = zip(*(column[name].to_pylist() for name in SIZES), strict=True)
    for data, counts, (width, layers, experts) in zip(
        column[BYTES].to_pylist(), column[COUNTS].to_pylist(), sizes, strict=True
    ):
        routes = np.frombuffer(data, np.dtype(DTYPES[width]).newbyteorder("<")) if width else None
        whole = None if routes is None else routes.astype(DTYPES[width], copy=False).reshape(-1, layers, experts)
        found.append((whole, counts))
    return found


def bytes_of(routes: Routes | None) -> bytes:
    """The lowest byte of a number first, on every machine."""
    return b"" if routes is None else routes.astype(routes.dtype.newbyteorder("<"), copy=False).tobytes()
