"""What is known of the request in every slot, as arrays: a pass handles all of them at once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.engines.slots.request import Request
from turnwise.engines.slots.sample import Shape
from turnwise.seeds import uniforms

Slots = NDArray[np.int64]


class Board:
    """Tokens, logprobs, versions, limits and sampling by slot."""

    def __init__(self, slots: int, context: int, device: str) -> None:
        self.context = context
        self.device = device
        self.tokens = np.zeros((slots, context), np.int32)
        self.logprobs = np.zeros((slots, context), np.float32)
        self.versions = np.zeros((slots, context), np.int32)
        self.length = np.zeros(slots, np.int64)  # tokens known
        self.prompt_length = np.zeros(slots, np.int64)
        self.own = np.zeros(slots, np.int64)  # where the row of its own begins
        self.limit = np.zeros(slots, np.int64)
        self.seeds = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.has_stops = np.zeros(slots, bool)

    def write(self, slot: int, request: Request) -> None:
        """Put a request on the board, with what was sampled for it before."""
        sampling, known = request.sampling, request.known
        size, prompt = len(known), len(request.prompt)
        self.tokens[slot, :size] = known
        self.logprobs[slot, prompt:size] = request.logprobs
        self.versions[slot, prompt:size] = request.versions
        self.length[slot], self.prompt_length[slot] = size, prompt
        self.limit[slot] = min(prompt + sampling.max_tokens, self.context)
        self.seeds[slot] = np.uint64(request.seed)
        self.temperature[slot] = sampling.temperature
        self.top_p[slot], self.top_k[slot] = sampling.top_p, sampling.top_k
        self.has_stops[slot] = bool(sampling.stop)

    def read(self, slot: int, request: Request) -> None:
        """Give a request what was sampled for it."""
        start, end = int(self.prompt_length[slot]), int(self.length[slot])
        request.tokens = self.tokens[slot, start:end].copy()
        request.logprobs = self.logprobs[slot, start:end].copy()
        request.versions = self.versions[slot, start:end].copy()

    def noise(self, slots: Slots) -> torch.Tensor:
        """The noise of the next token of each slot."""
        noise = uniforms(self.seeds[slots], self.length[slots] - self.prompt_length[slots])
        if self.device == "mps":  # which has no float64
            noise = noise.astype(np.float32).clip(max=1 - 2**-24)
        return torch.from_numpy(noise).to(self.device)

    def shape(self, slots: Slots) -> Shape:
        """How the next token of each slot is drawn."""

        def column(values: NDArray[np.float32] | NDArray[np.int64], neutral: float) -> torch.Tensor | None:
            own = values[slots]
            return None if (own == neutral).all() else torch.from_numpy(own).to(self.device)

        return Shape(column(self.temperature, 1.0), column(self.top_p, 1.0), column(self.top_k, 0))

    def add(self, slots: Slots, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int) -> None:
        """One more token for each slot."""
        place = self.length[slots]
        self.tokens[slots, place] = tokens
        self.logprobs[slots, place] = logprobs
        self.versions[slots, place] = version
        self.length[slots] += 1
