"""The state of every slot as arrays, so that one pass handles all running requests at once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.engines.base import SampledPart
from turnwise.engines.slots.radix import RouteRows
from turnwise.engines.slots.request import Request
from turnwise.engines.slots.sample import BatchSampling
from turnwise.routes import Routes
from turnwise.seeds import uniforms

SlotIds = NDArray[np.int64]


class SlotState:
    """Tokens, logprobs, versions, limits and sampling settings by slot."""

    def __init__(self, num_slots: int, context: int, device: str, route_rows: RouteRows | None = None) -> None:
        self.context = context
        self.device = device
        self.tokens = np.zeros((num_slots, context), np.int32)
        self.logprobs = np.zeros((num_slots, context), np.float32)
        self.versions = np.zeros((num_slots, context), np.int32)
        self.length = np.zeros(num_slots, np.int64)  # tokens of prompt and action so far
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.row_start = np.zeros(num_slots, np.int64)  # position of the first token that the slot's row holds
        self.limit = np.zeros(num_slots, np.int64)
        self.seeds = np.zeros(num_slots, np.uint64)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.has_stops = np.zeros(num_slots, bool)
        self.is_guided = np.zeros(num_slots, bool)
        self.routes: Routes | None = None
        """[slots, context, layers, k] of the tokens in the slot's row; None where nobody records them."""
        if route_rows is not None:
            rows = route_rows(num_slots * context)
            self.routes = rows.reshape(num_slots, context, *rows.shape[1:])

    @property
    def num_slots(self) -> int:
        return len(self.length)

    def write(self, slot: int, request: Request) -> None:
        """Put a request into a slot, with the tokens that were sampled for it before."""
        sampling, tokens = request.sampling, request.all_tokens
        length, prompt_length = len(tokens), len(request.prompt)
        self.tokens[slot, :length] = tokens
        self.logprobs[slot, prompt_length:length] = request.logprobs
        self.versions[slot, prompt_length:length] = request.versions
        self.length[slot], self.prompt_length[slot] = length, prompt_length
        self.limit[slot] = min(prompt_length + sampling.max_tokens, self.context)
        self.seeds[slot] = np.uint64(request.seed)
        self.temperature[slot] = sampling.temperature
        self.top_p[slot], self.top_k[slot] = sampling.top_p, sampling.top_k
        self.has_stops[slot] = bool(sampling.stop)
        self.is_guided[slot] = request.guide is not None

    def read(self, slot: int, request: Request) -> None:
        """Give a request the tokens that were sampled in its slot."""
        start, end = int(self.prompt_length[slot]), int(self.length[slot])
        request.tokens = self.tokens[slot, start:end].copy()
        request.logprobs = self.logprobs[slot, start:end].copy()
        request.versions = self.versions[slot, start:end].copy()

    def sampled_after(self, slot: int, count: int) -> SampledPart:
        """The tokens sampled in a slot, without the first `count`."""
        part = slice(int(self.prompt_length[slot]) + count, int(self.length[slot]))
        return SampledPart(
            self.tokens[slot, part].copy(), self.logprobs[slot, part].copy(), self.versions[slot, part].copy()
        )

    def noise(self, slots: SlotIds) -> torch.Tensor:
        """The noise of the next token of each slot."""
        noise = uniforms(self.seeds[slots], self.length[slots] - self.prompt_length[slots])
        if self.device == "mps":  # which has no float64
            noise = noise.astype(np.float32).clip(max=1 - 2**-24)
        return torch.from_numpy(noise).to(self.device)

    def sampling(self, slots: SlotIds) -> BatchSampling:
        """How the next token of each slot is drawn."""

        def column(values: NDArray[np.float32] | NDArray[np.int64], neutral: float) -> torch.Tensor | None:
            chosen = values[slots]
            return None if (chosen == neutral).all() else torch.from_numpy(chosen).to(self.device)

        return BatchSampling(column(self.temperature, 1.0), column(self.top_p, 1.0), column(self.top_k, 0))

    def append(self, slots: SlotIds, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int) -> None:
        """Add one token to each slot."""
        position = self.length[slots]
        self.tokens[slots, position] = tokens
        self.logprobs[slots, position] = logprobs
        self.versions[slots, position] = version
        self.length[slots] += 1
