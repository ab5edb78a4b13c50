"""What grammars allowed, as columns of the archive: the distinct sets of an attempt, and one number per action token.

A file has these columns only where some turn was guided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.allowed import Allowed
from turnwise.runs.columns import bounds_of, list_column, pieces_of, token_column
from turnwise.types import Trajectory

SETS, PLACES = "allowed_sets", "allowed"
UNGUIDED = -1
"""The place of an action token that was drawn from all tokens."""


def allowed_columns(attempts: Sequence[Trajectory]) -> dict[str, Any]:
    """The columns of attempts; none where no turn was guided."""
    import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

    if all(turn.allowed is None for attempt in attempts for turn in attempt.turns):
        return {}
    sets: list[bytes] = []
    sizes, places = [], []
    for attempt in attempts:
        numbers: dict[bytes, int] = {}
        for turn in attempt.turns:
            if turn.allowed is None or not len(turn.action):
                places.append(np.full(len(turn.action), UNGUIDED, np.int32))
            else:
                renumbered = [numbers.setdefault(packed, len(numbers)) for packed in turn.allowed.sets]
                places.append(np.array(renumbered, np.int32)[turn.allowed.places])
        sets += numbers
        sizes.append(len(numbers))
    return {
        SETS: list_column(sizes, pa.array(sets, pa.large_binary())),
        PLACES: token_column([attempt.num_action_tokens for attempt in attempts], places, np.int32),
    }


def read_allowed(column: Mapping[str, Any], actions: NDArray[np.int64]) -> list[Allowed | None]:
    """Inverse of `allowed_columns`: one entry per turn, whose action has so many tokens."""
    if PLACES not in column:
        return [None] * len(actions)
    kept: dict[bytes, bytes] = {}
    packed = [kept.setdefault(one, one) for one in column[SETS].values.to_pylist()]
    pieces = pieces_of(column[PLACES], actions)
    found: list[Allowed | None] = []
    for (first, last), (low, high) in zip(bounds_of(column["turns"]), bounds_of(column[SETS]), strict=True):
        sets = packed[low:high]
        for _ in range(first, last):
            found.append(allowed_of(next(pieces), sets))
    return found


def allowed_of(places: NDArray[np.int32], sets: Sequence[bytes]) -> Allowed | None:
    if not len(places) or places[0] == UNGUIDED:
        return None
    used, numbers = np.unique(places, return_inverse=True)
    return Allowed(numbers.astype(np.int32), tuple(sets[place] for place in used.tolist()))
