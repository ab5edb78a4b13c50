"""Where two attempts at a task part: the first turn and token that differ."""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.plan.tree import sequence_of
from turnwise.tokens import common_prefix
from turnwise.types import Trajectory


@dataclass(frozen=True, slots=True)
class Difference:
    """The place where two attempts part.

    Example:
        Difference(turn=1, shared=44, sampled=True, same=False)
    """

    turn: int
    """The first turn that differs, or the first that one of them does not have."""
    shared: int
    """Tokens of that turn, prompt and action, that both begin with; 0 where one of them does not have the turn."""
    sampled: bool
    """Whether they part in an action: the model chose differently. Otherwise they were given different prompts, or one
    of them ended."""
    same: bool
    """Whether all turns of both are alike."""


def difference(one: Trajectory, other: Trajectory) -> Difference:
    """Where two attempts part."""
    for place, (left, right) in enumerate(zip(one.turns, other.turns, strict=False)):
        first, second = sequence_of(left), sequence_of(right)
        shared = common_prefix(first, second)
        prompts = len(left.prompt), len(right.prompt)
        if shared < max(len(first), len(second)) or prompts[0] != prompts[1]:
            return Difference(place, shared, shared >= max(prompts), same=False)
    last = min(len(one.turns), len(other.turns))
    return Difference(last, 0, False, same=len(one.turns) == len(other.turns))
