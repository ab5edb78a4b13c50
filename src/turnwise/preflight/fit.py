"""Whether a rank fits on a card, and which key to change where it does not."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnwise.preflight.card import RESERVED, Card
from turnwise.preflight.operation_counter import BUFFERS, GATHER, GATHER_ROOT, REDUCTION
from turnwise.preflight.rehearsal import FROZEN, GRADIENTS, MASTERS, MOMENTS, Rehearsal
from turnwise.recipe.schema import Recipe

SHARDED = (MASTERS, MOMENTS, GRADIENTS, FROZEN)
"""What ranks divide among themselves."""
OF_WEIGHTS = (*SHARDED, GATHER, GATHER_ROOT, BUFFERS, REDUCTION)
"""What does not depend on the tokens of a pass."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A rank on a card."""

    card: Card
    left: float
    """Bytes that no part of the rank needs; below zero where it does not fit."""
    advice: str
    """What to change where it does not fit."""

    @property
    def fits(self) -> bool:
        return self.left >= 0


def fit(recipe: Recipe, found: Rehearsal, card: Card) -> Fit:
    left = card.memory - RESERVED - found.peak
    return Fit(card, left, "" if left >= 0 else advice(recipe, found, card.memory - RESERVED))


def advice(recipe: Recipe, found: Rehearsal, room: float) -> str:
    """The key that helps most, with a value that is enough by proportion."""
    if recipe.model.dtype == "float32" and found.device != "cpu":
        return 'set model.dtype = "bfloat16"'
    of_tokens = sum(size for name, size in found.at_peak.items() if name not in OF_WEIGHTS)
    whole = found.peak - of_tokens
    if not found.checkpoints and of_tokens > whole:
        return "set model.gradient_checkpointing = true"
    longest = recipe.rollout.max_trajectory_tokens
    tokens = int(found.num_tokens * (room - whole) / of_tokens) if of_tokens else 0
    if tokens >= longest or (found.device == "cpu" and tokens > 0):
        return f"lower max_tokens_per_microbatch to {max(1, tokens // 256 * 256 or tokens)}"
    divided = sum(found.at_peak.get(name, 0) for name in SHARDED)
    rest = found.peak - divided
    least = of_tokens * longest / max(1, found.num_tokens) + whole - divided
    parts = recipe.cluster.fsdp
    if rest < room:
        return f"raise cluster.fsdp to {enough(parts, divided, room - rest)}"
    if least < room:
        more = enough(parts, divided, room - least)
        return f"lower max_tokens_per_microbatch to {longest} and raise cluster.fsdp to {more}"
    return f"lower rollout.max_trajectory_tokens: a pass of {longest} tokens needs more than the card has"


def enough(parts: int, divided: float, room: float) -> int:
    """The least power of two of parts with which a share has room."""
    return int(2 ** math.ceil(math.log2(max(parts + 1, divided * parts / room))))
