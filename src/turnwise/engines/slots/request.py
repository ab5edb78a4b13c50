"""One call to the slot engine, from its submission to its completion."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from turnwise.engines.base import Completion, OnTokens, Sampling
from turnwise.engines.guidance import Guide
from turnwise.engines.places import UNKNOWN, Place
from turnwise.engines.recent_text import RecentText
from turnwise.engines.slots.radix import NO_NODE, PrefixNode
from turnwise.routes import Routes
from turnwise.tokens import Floats, Tokens
from turnwise.types import StopReason, TurnTiming

NO_SLOT = -1


@dataclass(eq=False, slots=True)
class Request:
    """A call, the tokens sampled for it before it last lost its slot, and its slot now."""

    prompt: Tokens
    sampling: Sampling
    session: str
    seed: int
    future: asyncio.Future[Completion]
    guide: Guide | None = None
    """Follows the grammar of the call, if it has one."""
    place: Place = UNKNOWN
    """Where it stands among the calls of one step."""
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    routes: Routes | None = None
    """Of the tokens from `Sampling.routes` on, once it has lost its slot."""
    node: PrefixNode = NO_NODE
    """The last node of the prefix tree that the request reads; the tokens after it are in the request's row."""
    slot: int = NO_SLOT
    submitted_at: float = field(default_factory=time.perf_counter)
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    cached: int = 0
    """Tokens of the prompt whose keys and values were there at the first admission."""
    on_tokens: OnTokens | None = None
    num_reported: int = 0
    """Sampled tokens that `on_tokens` was called with."""
    recent_text: RecentText = field(init=False)
    """The end of the sampled text, where stop strings are looked for."""

    def __post_init__(self) -> None:
        self.recent_text = RecentText(max(map(len, self.sampling.stop), default=0))

    @property
    def all_tokens(self) -> Tokens:
        """The prompt and the tokens sampled before the request last lost its slot."""
        return np.concatenate([self.prompt, self.tokens])

    def completion(self, stop: StopReason) -> Completion:
        """All that was sampled, in arrays that nobody can write to."""
        now = time.perf_counter()
        admitted_at = self.admitted_at or now
        first_token_at = self.first_token_at or now
        for array in (self.tokens, self.logprobs, self.versions):
            array.flags.writeable = False
        timing = TurnTiming(admitted_at - self.submitted_at, first_token_at - admitted_at, now - first_token_at)
        allowed = None if self.guide is None else self.guide.allowed
        return Completion(self.tokens, self.logprobs, self.versions, stop, timing, allowed, self.cached, self.routes)
