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
"""The cost of a forward pass as a share of forward and backward; a backward pass costs two forward passes."""
PACKED = "packed"


@dataclass(frozen=True, slots=True)
class Load:
    """The amount that the model computes in a layout, forward and backward."""

    passes: float
    tokens: float
    """With padding. The second forward pass of a token in a split path counts one third."""
    pairs: float
    """Pairs of query and key in each layer and head."""
    targets: float
    """Tokens whose logprobs are computed."""
    blocks: float
    """Calls of the attention kernel in each layer."""

    @property
    def numbers(self) -> NDArray[np.float64]:
        return np.array(astuple(self), np.float64)


def load_of_rows(batches: Sequence[Rows], turns: Sequence[Turn]) -> Load:
    """The load of padded batches. Their output head computes logprobs of actions only, as ours does."""
    return Load(
        passes=len(batches),
        tokens=sum(rows.num_tokens for rows in batches),
        pairs=sum(rows.num_pairs for rows in batches),
        targets=sum(len(turns[turn].action) for rows in batches for turn in rows.turns),
        blocks=len(batches),
    )


def load_of_plans(plans: Sequence[Plan]) -> Load:
    """The load of plans. All passes of a split path except the last run forward twice."""
    stretches = [(stretch, stretch is not plan.stretches[-1]) for plan in plans for stretch in plan.stretches]
    times = [1.0 + SECOND_FORWARD * again for _, again in stretches]
    computed = [stretch for stretch, _ in stretches]
    return Load(
        passes=sum(times),
        tokens=sum(factor * (stretch.end - stretch.start) for factor, stretch in zip(times, computed, strict=True)),
        pairs=sum(factor * stretch.blocks.num_pairs for factor, stretch in zip(times, computed, strict=True)),
        targets=sum(len(stretch.nodes) for stretch in computed),
        blocks=sum(len(stretch.blocks.squares) + len(stretch.blocks.rectangles) for stretch in computed),
    )


def loads(turns: Sequence[Turn], tokens_per_pass: int) -> dict[str, Load]:
    """The load of some turns, by layout. Layouts that cannot split a turn get at least the longest turn as budget."""
    room = max(tokens_per_pass, *map(length, turns))
    return {
        "padded rows": load_of_rows(pad(turns, room), turns),
        "padded rows by length": load_of_rows(pad_by_length(turns, room), turns),
        PACKED: load_of_plans(pack(turns, room)),
        "strict prefix merge": load_of_plans(merge(turns, room)),
        "tree": load_of_plans(cut(turns, tokens_per_pass)),
    }
