"""Workloads: the attempts that a simulation plays, drawn from a shape or from what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from turnwise.preflight.attempt_shape import AttemptShape


class SimulatedTurn(NamedTuple):
    """A turn before it is played."""

    prompt: int
    """New tokens: of the first turn its prompt, of a later one what the environment said."""
    action: int
    environment: float
    """Seconds that the environment takes to answer."""


SimulatedAttempt = Sequence[SimulatedTurn]
Delay = Callable[[Random], float]
"""Draws the seconds of an environment call."""
Workload = Callable[[Random], Sequence[SimulatedAttempt]]
"""Draws the attempts of a group. Their first prompt is one."""


def no_delay(random: Random) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class LognormalDelay:
    """Environment calls of a lognormal time: `median` seconds, heavier tails with a larger `sigma`.

    Example:
        LognormalDelay(median=1.0, sigma=1.0)
    """

    median: float
    sigma: float

    def __call__(self, random: Random) -> float:
        return self.median * random.lognormvariate(0.0, self.sigma)


@dataclass(frozen=True, slots=True)
class ShapedGroups:
    """Groups of attempts of a recipe's shape: on average `share` of the turns and of the action tokens that it allows,
    both lognormal and cut off at what it allows.

    Example:
        ShapedGroups(AttemptShape.of(recipe), delay=LognormalDelay(0.5, 1.0))
    """

    shape: AttemptShape
    delay: Delay = no_delay
    share: float = 0.5
    sigma: float = 0.7

    def __call__(self, random: Random) -> list[SimulatedAttempt]:
        return [self.attempt(random) for _ in range(self.shape.group)]

    def attempt(self, random: Random) -> SimulatedAttempt:
        turns = self.drawn(random, self.shape.turns)
        prompts = [self.shape.prompt, *[self.shape.reply] * (turns - 1)]
        return [SimulatedTurn(prompt, self.drawn(random, self.shape.action), self.delay(random)) for prompt in prompts]

    def drawn(self, random: Random, most: int) -> int:
        """A number of at most `most`."""
        return max(1, min(most, round(self.share * most * random.lognormvariate(0.0, self.sigma))))


@dataclass(frozen=True, slots=True)
class RedrawnGroups:
    """Groups that a run recorded, drawn again, with environment calls of another time."""

    groups: Sequence[Sequence[SimulatedAttempt]]
    delay: Delay = no_delay

    def __call__(self, random: Random) -> list[SimulatedAttempt]:
        group = random.choice(self.groups)
        return [[turn._replace(environment=self.delay(random)) for turn in attempt] for attempt in group]
