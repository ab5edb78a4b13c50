"""A call in an engine's hands."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from turnwise.engines.base import Completion, Sampling
from turnwise.engines.slots.radix import NOWHERE, Node
from turnwise.engines.slots.recent_text import RecentText
from turnwise.types import Floats, StopReason, Tokens, TurnTiming


@dataclass(eq=False, slots=True)
class Request:
    """A call, what was sampled for it before it last lost its slot, and where it is now."""

    prompt: Tokens
    sampling: Sampling
    session: str
    seed: int
    future: asyncio.Future[Completion]
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    node: Node = NOWHERE
    """The last node of the prefix tree that its prompt follows, and its row does not hold."""
    slot: int = -1
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    first: float = 0.0
    recent: RecentText = field(init=False)
    """The end of what it says, where stop strings are looked for."""

    def __post_init__(self) -> None:
        self.recent = RecentText(max(map(len, self.sampling.stop), default=0))

    @property
    def known(self) -> Tokens:
        return np.concatenate([self.prompt, self.tokens])

    def completion(self, stop: StopReason) -> Completion:
        """All that was sampled, as it is handed over."""
        now = time.perf_counter()
        admitted = self.admitted or now
        first = self.first or now
        for array in (self.tokens, self.logprobs, self.versions):
            array.flags.writeable = False
        timing = TurnTiming(admitted - self.submitted, first - admitted, now - first)
        return Completion(self.tokens, self.logprobs, self.versions, stop, timing)
