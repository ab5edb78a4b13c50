"""Paces: how long the parts of a run take, as measured on this machine or as a card's figures say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from turnwise.preflight.card import PRODUCT_SHARE, Card
from turnwise.preflight.engine_memory import EngineMemory

OVERHEAD = 2e-3
"""Seconds of an iteration in which an engine on a card schedules and samples. An assumption."""


class EnginePace(Protocol):
    """How fast one engine is."""

    def iteration(self, sequences: int, context: float) -> float:
        """Seconds in which so many sequences get a token each, whose texts have `context` tokens together."""
        ...

    def prefill(self, tokens: float, calls: int) -> float:
        """Seconds in which the prompts of so many calls are computed, of which `tokens` were not in the cache."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """An engine whose passes were timed: seconds are linear in what a pass holds.

    Example:
        MeasuredPace(fixed=2e-3, sequence=5e-5, prompt=2e-5)
    """

    fixed: float
    """Of a pass, whatever it holds."""
    sequence: float
    """More for each sequence that gets a token."""
    prompt: float
    """More for each token of a prompt."""
    call: float = 0.0
    """More for each call: where the engine computes in the thread of the agent loop, what that takes."""

    def iteration(self, sequences: int, context: float) -> float:
        return self.fixed + self.sequence * sequences

    def prefill(self, tokens: float, calls: int) -> float:
        return self.prompt * tokens + self.call * calls


@dataclass(frozen=True, slots=True)
class CardPace:
    """An engine over `engine.cards` cards: an iteration reads the weights and all keys and values, or multiplies, if
    that takes longer; a prefill multiplies."""

    engine: EngineMemory
    card: Card

    def iteration(self, sequences: int, context: float) -> float:
        rate = self.engine.rate(self.card, sequences, int(context / sequences))
        return sequences / rate + OVERHEAD

    def prefill(self, tokens: float, calls: int) -> float:
        return 2.0 * self.engine.active * tokens / self.engine.cards / (PRODUCT_SHARE * self.card.flops)


@dataclass(frozen=True, slots=True)
class LearnerPace:
    """How fast the learner is.

    Example:
        LearnerPace(fixed=0.5, token=2e-5, publish=1.0, load=0.5)
    """

    fixed: float
    """Seconds of a step, however many tokens it has: the optimizer."""
    token: float
    """More for each unique token of the step: scoring, forward and backward passes."""
    publish: float
    """Seconds in which the weights are made ready; engines go on."""
    load: float
    """Seconds in which the engines take them and sample nothing."""
    pass_tokens: float = math.inf
    """Tokens that all ranks compute in a pass."""
    pass_seconds: float = 0.0
    """That a pass takes at least: its collectives, and starting its kernels."""

    def seconds(self, tokens: int) -> float:
        passes = math.ceil(tokens / self.pass_tokens) if self.pass_seconds else 0
        return self.fixed + max(self.token * tokens, self.pass_seconds * passes)
