"""The broken prefixes of a run: turns whose prompt does not extend the turn before, with cause and cost in tokens."""

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
"""How many tokens an example shows on each side of the point where the prompts differ."""


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
    """The broken prefixes among all turns after the first, in the attempts that count."""

    steps: int
    later_turns: int
    causes: tuple[Cause, ...]
    """The most expensive first."""


def find_breaks(archive: Path) -> Breaks:
    """The broken prefixes of the steps in an archive."""
    steps = archived_steps(archive)
    if not steps:
        raise ValueError(f"{archive} has no steps yet; the first training step writes one")
    later = 0
    causes: dict[Break, Cause] = {}
    for step in steps:
        for record in read_step(archive / f"step-{step:06d}.parquet"):
            for number, trajectory in enumerate(record.group.trajectories):
                for turn_number, (before, turn) in enumerate(pairwise(trajectory.turns), 2):
                    later += 1
                    if extends(turn, before):
                        continue
                    where = f"step {step}, task {record.group.task.id}, attempt {number}, turn {turn_number}"
                    cause = causes.get(turn.broke) or Cause(turn.broke, 0, 0, Example(where, before, turn))
                    lost = cause.lost_tokens + lost_tokens(turn, before)
                    causes[turn.broke] = replace(cause, count=cause.count + 1, lost_tokens=lost)
    return Breaks(len(steps), later, tuple(sorted(causes.values(), key=lambda cause: -cause.lost_tokens)))


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
    """The point where the prompts of an example differ, with the tokens on both sides."""
    before, turn = cause.example.before, cause.example.turn
    old_tokens = np.concatenate([before.prompt, before.action])
    shared = len(old_tokens) - lost_tokens(turn, before)

    def token_text(tokens: Sequence[int]) -> str:
        if not decode or not tokens:
            return " ".join(map(str, tokens)) or "nothing"
        # If only the tokenisation differs, the tokens are shown one by one.
        parts = [[token] for token in tokens] if cause.cause is Break.retokenised else [tokens]
        return " ".join(repr(decode(part)) for part in parts)

    return [
        f"{cause.cause}, for instance in {cause.example.place}, from token {shared} of {len(old_tokens)} on",
        f"  after   {token_text(old_tokens[max(0, shared - SHOWN) : shared].tolist())}",
        f"  was     {token_text(old_tokens[shared : shared + SHOWN].tolist())}",
        f"  became  {token_text(turn.prompt[shared : shared + SHOWN].tolist())}",
    ]
