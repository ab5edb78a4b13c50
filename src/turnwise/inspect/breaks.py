"""The broken prefixes of a run: turns that do not begin with the turn before, why, and how many tokens that cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from turnwise.runs.archive import archived_steps, read_step
from turnwise.tokens import extends, lost_tokens
from turnwise.types import Break, Turn

SHOWN = 12
"""Tokens of an example on each side of the place where the prompts part."""


@dataclass(frozen=True, slots=True)
class Example:
    """One broken prefix."""

    place: str
    before: Turn
    turn: Turn


@dataclass(frozen=True, slots=True)
class Cause:
    """All broken prefixes of one cause."""

    cause: Break
    count: int
    lost_tokens: int
    example: Example


@dataclass(frozen=True, slots=True)
class Breaks:
    """What became of all turns after a first, in the attempts that count."""

    steps: int
    later_turns: int
    causes: tuple[Cause, ...]
    """The dearest first."""


def find_breaks(archive: Path) -> Breaks:
    """The broken prefixes of the steps in an archive."""
    steps = archived_steps(archive)
    if not steps:
        raise ValueError(f"{archive} has no steps yet; the first training step writes one")
    later = 0
    found: dict[Break, Cause] = {}
    for step in steps:
        for record in read_step(archive / f"step-{step:06d}.parquet"):
            for number, trajectory in enumerate(record.group.trajectories):
                for place, (before, turn) in enumerate(pairwise(trajectory.turns), 2):
                    later += 1
                    if extends(turn, before):
                        continue
                    where = f"step {step}, task {record.group.task.id}, attempt {number}, turn {place}"
                    cause = found.get(turn.broke) or Cause(turn.broke, 0, 0, Example(where, before, turn))
                    lost = cause.lost_tokens + lost_tokens(turn, before)
                    found[turn.broke] = replace(cause, count=cause.count + 1, lost_tokens=lost)
    return Breaks(len(steps), later, tuple(sorted(found.values(), key=lambda cause: -cause.lost_tokens)))


def describe_breaks(breaks: Breaks, decode: Callable[[Sequence[int]], str] | None) -> list[str]:
    """Lines for a person; without a decoder tokens are shown as numbers."""
    broken = sum(cause.count for cause in breaks.causes)
    steps = f"{breaks.steps} archived step{'s' if breaks.steps > 1 else ''}"
    if not broken:
        return [f"{breaks.later_turns} turns after a first in {steps}, and all extend the turn before"]
    share = 100 * (1 - broken / breaks.later_turns)
    lines = [
        f"{breaks.later_turns} turns after a first in {steps}; {share:.1f} % extend the turn before",
        f"{'cause':<12} {'turns':>9} {'tokens lost':>13} {'per turn':>10}",
    ]
    for cause in breaks.causes:
        per_turn = cause.lost_tokens / cause.count
        lines.append(f"{cause.cause:<12} {cause.count:>9} {cause.lost_tokens:>13} {per_turn:>10.1f}")
    for cause in breaks.causes:
        lines += describe_example(cause, decode)
    return lines


def describe_example(cause: Cause, decode: Callable[[Sequence[int]], str] | None) -> list[str]:
    """Where the prompts of an example part, and what is on both sides."""
    before, turn = cause.example.before, cause.example.turn
    known = np.concatenate([before.prompt, before.action])
    same = len(known) - lost_tokens(turn, before)

    def shown(tokens: Sequence[int]) -> str:
        if not decode or not tokens:
            return " ".join(map(str, tokens)) or "nothing"
        # Where only the tokens differ, they have to be seen one by one.
        parts = [[token] for token in tokens] if cause.cause is Break.retokenised else [tokens]
        return " ".join(repr(decode(part)) for part in parts)

    return [
        f"{cause.cause}, for instance in {cause.example.place}, from token {same} of {len(known)} on",
        f"  after   {shown(known[max(0, same - SHOWN) : same].tolist())}",
        f"  was     {shown(known[same : same + SHOWN].tolist())}",
        f"  became  {shown(turn.prompt[same : same + SHOWN].tolist())}",
    ]
