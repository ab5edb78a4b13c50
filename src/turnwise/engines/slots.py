"""The in-process engine: continuous batching over slots, on a transformers module.

`SlotModel` computes: one step advances every active request by one token. `SlotEngine` drives it from the event loop.
At lag 0 the module is the learner's own and a step runs in the event loop itself, once every coroutine that can run
waits for it, so that a run is a deterministic function of its seed. With lag it owns a copy and steps in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from turnwise.engines.base import Completion, EngineFailure, Sampling
from turnwise.engines.cache import SlotCache
from turnwise.engines.noise import uniforms
from turnwise.engines.sample import Shape, draw
from turnwise.types import StopReason, Tokens, TurnTiming

Run = Callable[..., Any]
PREFILL_TOKENS = 8192


@dataclass(eq=False, slots=True)
class Request:
    """A call in the engine's hands."""

    prompt: Tokens
    sampling: Sampling
    session: str
    seed: int
    future: asyncio.Future[Completion]
    slot: int = -1
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    first: float = 0.0


class SlotModel:
    """Slots, their tokens and their cache; one call to `step` samples one token for every active request."""

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        context: int,
        end_tokens: Sequence[int],
        decode: Callable[[list[int]], str],
        dtype: torch.dtype,
        version: int = 0,
    ) -> None:
        config = model.config
        self.model = model
        self.context = context
        self.version = version
        self.dtype = dtype
        self.decode = decode
        self.end_tokens = np.array(sorted(set(end_tokens)), np.int64)
        self.heads = config.num_attention_heads
        self.device = next(model.parameters()).device.type
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.cache = SlotCache(slots, context, config.num_hidden_layers, kv_heads, head_dim, dtype, self.device)
        self.tokens = np.zeros((slots, context), np.int32)
        self.logprobs = np.zeros((slots, context), np.float32)
        self.versions = np.zeros((slots, context), np.int32)
        self.filled = np.zeros(slots, np.int64)  # tokens whose keys and values are cached
        self.cached_by = np.zeros(slots, np.int64)  # version of the weights when caching began
        self.length = np.zeros(slots, np.int64)  # tokens known
        self.prompt_length = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.seeds = np.zeros(slots, np.uint64)
        self.used = np.zeros(slots, np.int64)  # when the slot was last taken, for eviction
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.homes: dict[str, int] = {}  # session -> slot that holds its history
        self.clock = 0
        self.model_seconds = 0.0
        self.prefilled_tokens = 0
        self.sampled_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self.requests or self.waiting)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request whose caller has gone."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif self.requests.get(request.slot) is request:
            del self.requests[request.slot]

    def abort(self, session: str) -> list[tuple[Request, Completion]]:
        """End the calls of a session with what was sampled so far."""
        running = [request for request in self.requests.values() if request.session == session]
        done = [(request, self.finish(request, StopReason.abort)) for request in running]
        for request in [request for request in self.waiting if request.session == session]:
            self.waiting.remove(request)
            empty = np.zeros(0, np.int32)
            timing = TurnTiming(queued=time.perf_counter() - request.submitted)
            done.append((request, Completion(empty, np.zeros(0, np.float32), empty, StopReason.abort, timing)))
        return done

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy weights in, none where the module is shared. Calls in flight keep their cache; no other reuses it."""
        if weights:
            own = self.model.state_dict()
            if missing := own.keys() - weights.keys():
                raise EngineFailure(f"a weight load lacks {len(missing)} tensors, for instance {sorted(missing)[0]}")
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(weights[name])
        self.version = version
        self.forget()

    def forget(self) -> None:
        """Drop the prefixes of idle slots, and the order in which slots were used."""
        self.filled[[slot for slot in range(len(self.filled)) if slot not in self.requests]] = 0
        self.used[:] = 0
        self.clock = 0
        self.homes = {request.session: slot for slot, request in self.requests.items()}

    def admit(self) -> None:
        """Give waiting requests a slot each, while there are slots and the pass stays within its prefill budget."""
        budget = PREFILL_TOKENS
        while self.waiting and len(self.requests) < len(self.filled) and budget > 0:
            request = self.waiting[0]
            slot = self.place(request)
            size = len(request.prompt)
            self.tokens[slot, :size] = request.prompt
            self.length[slot] = self.prompt_length[slot] = size
            self.limit[slot] = min(size + request.sampling.max_tokens, self.context)
            self.seeds[slot] = np.uint64(request.seed)
            self.cached_by[slot] = self.version
            self.clock += 1
            self.used[slot] = self.clock
            request.slot = slot
            request.admitted = time.perf_counter()
            self.requests[slot] = request
            self.homes[request.session] = slot
            self.waiting.pop(0)
            budget -= int(size - self.filled[slot])

    def place(self, request: Request) -> int:
        """The slot for a request, with the longest known prefix of its prompt in the cache."""
        prompt = request.prompt[:-1]  # the last token is always computed: its logits are needed
        same = self.tokens[:, : len(prompt)] == prompt
        reusable = np.where(self.cached_by == self.version, self.filled, 0)
        common = np.minimum(np.where(same.all(1), len(prompt), same.argmin(1) if len(prompt) else 0), reusable)
        best = int(common.argmax())
        home = self.homes.get(request.session, -1)
        if home >= 0 and home not in self.requests and common[home] == common[best]:
            self.filled[home] = common[home]
            return home
        free = [slot for slot in range(len(self.filled)) if slot not in self.requests]
        slot = min(free, key=lambda s: self.used[s])
        if common[best] > common[slot]:
            self.cache.copy_prefix(best, slot, int(common[best]))
        self.filled[slot] = common[best]
        self.homes = {session: where for session, where in self.homes.items() if where != slot}
        return slot

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Completion]]:
        """Admit what fits, compute one pass, sample one token per active request; what has ended is returned."""
        self.admit()
        if not self.requests:
            return []
        slots = np.fromiter(self.requests, np.int64, len(self.requests))
        logits = self.forward(slots)
        requests = [self.requests[slot] for slot in slots]
        self.filled[slots] = self.length[slots]
        noise = uniforms(self.seeds[slots], self.length[slots] - self.prompt_length[slots])
        tokens, logprobs = draw(logits, self.shape(requests), self.on_device(noise))
        sampled = tokens.cpu().numpy()
        place = self.length[slots]
        self.tokens[slots, place] = sampled
        self.logprobs[slots, place] = logprobs.cpu().numpy()
        self.versions[slots, place] = self.version
        self.length[slots] += 1
        self.sampled_tokens += len(slots)
        now = time.perf_counter()
        for index in np.flatnonzero(place == self.prompt_length[slots]):
            requests[index].first = now
        return self.finished(slots, requests, sampled)

    def forward(self, slots: np.ndarray) -> torch.Tensor:
        """Logits [B, V] after the last known token of each slot; caches keys and values of all tokens up to it."""
        starts, counts = self.filled[slots], self.length[slots] - self.filled[slots]
        self.prefilled_tokens += int(counts.sum() - len(slots))
        owner = np.repeat(np.arange(len(slots)), counts)
        ends = np.cumsum(counts)
        positions = starts[owner] + np.arange(len(owner)) - (ends - counts)[owner]
        tokens = self.tokens[slots[owner], positions]
        attend = self.cache.attend(slots, starts, counts, self.heads)
        before = time.perf_counter()
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.model.base_model(
                input_ids=torch.from_numpy(tokens.astype(np.int64))[None].to(self.device),
                position_ids=torch.from_numpy(positions)[None].to(self.device),
                use_cache=False,
                attend=attend,
            ).last_hidden_state[0]
            logits: torch.Tensor = self.model.get_output_embeddings()(
                hidden[torch.from_numpy(ends - 1).to(self.device)]
            )
        self.model_seconds += time.perf_counter() - before
        return logits

    def on_device(self, noise: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(noise.astype(np.float32).clip(max=1 - 2**-24) if self.device == "mps" else noise).to(
            self.device
        )

    def shape(self, requests: Sequence[Request]) -> Shape:
        def column(name: str, neutral: float) -> torch.Tensor | None:
            values = [getattr(request.sampling, name) for request in requests]
            return None if all(value == neutral for value in values) else torch.tensor(values, device=self.device)

        return Shape(column("temperature", 1.0), column("top_p", 1.0), column("top_k", 0))

    def finished(
        self, slots: np.ndarray, requests: Sequence[Request], sampled: np.ndarray
    ) -> list[tuple[Request, Completion]]:
        """The requests that the newest tokens ended."""
        ended = np.isin(sampled, self.end_tokens)
        full = self.length[slots] >= self.limit[slots]
        done = []
        for index, request in enumerate(requests):
            if ended[index]:
                done.append((request, self.finish(request, StopReason.end_token)))
            elif request.sampling.stop and self.has_stop_string(request):
                done.append((request, self.finish(request, StopReason.stop_string)))
            elif full[index]:
                done.append((request, self.finish(request, StopReason.length)))
        return done

    def has_stop_string(self, request: Request) -> bool:
        """Whether the newest token completed a stop string. A token has at least one byte, so the tail that can matter
        is as many tokens as the longest stop string has bytes, and one more: some decoders strip a leading space."""
        slot = request.slot
        longest = max(len(text.encode()) for text in request.sampling.stop)
        begin = max(self.prompt_length[slot], self.length[slot] - longest - 1)
        text = self.decode(self.tokens[slot, begin : self.length[slot]].tolist())
        return any(stop in text for stop in request.sampling.stop)

    def finish(self, request: Request, stop: StopReason) -> Completion:
        slot = request.slot
        del self.requests[slot]
        start, end = int(self.prompt_length[slot]), int(self.length[slot])
        now = time.perf_counter()
        first = request.first or now
        timing = TurnTiming(request.admitted - request.submitted, first - request.admitted, now - first)
        tokens = self.tokens[slot, start:end].copy()
        logprobs = self.logprobs[slot, start:end].copy()
        versions = self.versions[slot, start:end].copy()
        for array in (tokens, logprobs, versions):
            array.flags.writeable = False
        return Completion(tokens, logprobs, versions, stop, timing)

    def drop_all(self) -> list[Request]:
        """Forget every request, after a failed step."""
        dropped = [*self.requests.values(), *self.waiting]
        self.requests.clear()
        self.waiting.clear()
        self.filled[:] = 0
        self.homes.clear()
        return dropped


class SlotEngine:
    """`Engine` over a `SlotModel`. `run(function, *args)` is awaited to call the model: inline, or in a thread."""

    def __init__(self, model: SlotModel, *, run: Run, shares_weights: bool) -> None:
        self.model = model
        self.run = run
        self.shares_weights = shares_weights
        self.context = model.context
        self.arrivals: list[Request] = []
        self.departures: list[Request] = []
        self.wake = asyncio.Event()
        self.lock = asyncio.Lock()  # held while the model computes or loads
        self.running = asyncio.Event()
        self.running.set()
        self.driver: asyncio.Task[None] | None = None

    async def generate(self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int) -> Completion:
        if len(prompt) == 0:
            raise ValueError("an engine needs a prompt of at least one token")
        if len(prompt) >= self.context:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.context}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"a seed has 64 bits, got {seed}")
        if self.driver is None or self.driver.done():
            self.driver = asyncio.create_task(self.drive(), name="slot engine")
        request = Request(
            np.asarray(prompt, np.int32), sampling, session, seed, asyncio.get_running_loop().create_future()
        )
        self.arrivals.append(request)
        self.wake.set()
        try:
            return await request.future
        except asyncio.CancelledError:
            self.departures.append(request)
            self.wake.set()
            raise

    async def drive(self) -> None:
        """Step while there is work; every coroutine that can run gets to submit its request before each step."""
        while True:
            if not (self.arrivals or self.departures or self.model.busy):
                self.wake.clear()
                await self.wake.wait()
            await self.settle()
            while not self.running.is_set():
                await self.running.wait()
            async with self.lock:
                self.hand_over()
                try:
                    done = await self.run(self.model.step)
                except Exception as error:  # a failed step fails the calls in flight, not the run
                    self.fail(self.model.drop_all(), error)
                    continue
            self.answer(done)

    async def settle(self) -> None:
        quiet = 0
        while quiet < 2:
            seen = len(self.arrivals)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self.arrivals) == seen else 0

    def hand_over(self) -> None:
        for request in self.departures:
            if request in self.arrivals:
                self.arrivals.remove(request)
            self.model.cancel(request)
        for request in self.arrivals:
            self.model.submit(request)
        self.arrivals, self.departures = [], []

    def answer(self, done: list[tuple[Request, Completion]]) -> None:
        for request, completion in done:
            if not request.future.done():
                request.future.set_result(completion)

    def fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            if not request.future.done():
                request.future.set_exception(EngineFailure(f"the engine failed: {error}"))

    async def abort(self, session: str) -> None:
        async with self.lock:
            self.hand_over()
            self.answer(self.model.abort(session))

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        async with self.lock:
            await self.run(self.model.load, {} if self.shares_weights else weights, version)

    async def forget(self) -> None:
        async with self.lock:
            self.model.forget()

    async def pause(self) -> None:
        """Sample nothing more until `resume`; calls in flight wait. Returns once the present step is over."""
        self.running.clear()
        async with self.lock:
            return

    async def resume(self) -> None:
        self.running.set()

    async def close(self) -> None:
        if self.driver is not None:
            self.driver.cancel()
            await asyncio.gather(self.driver, return_exceptions=True)
            self.driver = None
        self.fail([*self.arrivals, *self.model.drop_all()], RuntimeError("it was closed"))
        self.arrivals = []
