"""What a layout has the model compute: passes, tokens, pairs and targets, counted without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.plan.plan import Plan
from turnwise.plan.rows import Rows, length, merge, pad, pad_by_length
from turnwise.types import Turn

SECOND_FORWARD = 1.0 / 3.0
"""Of a forward and backward pass: the backward one costs two forward passes."""
PACKED = "packed"


@dataclass(frozen=True, slots=True)
class Load:
    """What a layout has the model compute, forward and backward."""

    passes: float
    tokens: float
    """Padding included; the second forward pass of a token whose path is handed over counts a third."""
    pairs: float
    """Of query and key in each layer and head."""
    targets: float
    """Tokens whose logprobs are computed."""
    blocks: float
    """Calls of the attention kernel in each layer."""

    @property
    def numbers(self) -> NDArray[np.float64]:
        return np.array(astuple(self), np.float64)


def load_of_rows(batches: Sequence[Rows], turns: Sequence[Turn]) -> Load:
    """That of padded batches, whose heads are as thrifty as ours: logprobs of actions only."""
    return Load(
        passes=len(batches),
        tokens=sum(rows.num_tokens for rows in batches),
        pairs=sum(rows.num_pairs for rows in batches),
        targets=sum(len(turns[turn].action) for rows in batches for turn in rows.turns),
        blocks=len(batches),
    )


def load_of_plans(plans: Sequence[Plan]) -> Load:
    """That of plans, in which all passes of a path but its last run forward twice."""
    stretches = [(s, s is not plan.stretches[-1]) for plan in plans for s in plan.stretches]
    times = [1.0 + SECOND_FORWARD * again for _, again in stretches]
    found = [stretch for stretch, _ in stretches]
    return Load(
        passes=sum(times),
        tokens=sum(factor * (s.end - s.start) for factor, s in zip(times, found, strict=True)),
        pairs=sum(factor * s.blocks.num_pairs for factor, s in zip(times, found, strict=True)),
        targets=sum(len(s.nodes) for s in found),
        blocks=sum(len(s.blocks.squares) + len(s.blocks.rectangles) for s in found),
    )


def loads(turns: Sequence[Turn], tokens_per_pass: int) -> dict[str, Load]:
    """By layout: what it computes of some turns; a budget below the longest turn is raised where it must."""
    room = max(tokens_per_pass, *map(length, turns))
    return {
        "padded rows": load_of_rows(pad(turns, room), turns),
        "padded rows by length": load_of_rows(pad_by_length(turns, room), turns),
        PACKED: load_of_plans(pack(turns, room)),
        "strict prefix merge": load_of_plans(merge(turns, room)),
        "tree": load_of_plans(cut(turns, tokens_per_pass)),
    }
