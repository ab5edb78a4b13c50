"""The in-process engine: continuous batching on a transformers module, driven from the event loop.

At lag 0 the engine computes with the learner's module. A step then runs in the event loop, once every coroutine that
can run waits for it, and takes its calls in the order of their places, so that a run is a deterministic function of its
seed. With lag the engine has a copy of the module and steps in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from turnwise.engines.base import NO_ROUTES, Completion, EngineFailure, OnTokens, Sampling, checked_prompt, nothing
from turnwise.engines.grammar import Grammar
from turnwise.engines.guidance import NO_GRAMMARS, Guide
from turnwise.engines.places import MOST_ROUNDS, PLACE, is_idle, place_after
from turnwise.engines.slots.model import Finished, SlotModel
from turnwise.engines.slots.request import Request
from turnwise.tokens import Tokens
from turnwise.types import StopReason
from turnwise.weights.parted import PartedWeights
from turnwise.weights.stages import stage

Run = Callable[..., Any]


class SlotEngine:
    """`StreamingEngine` over a `SlotModel`. `run(function, *args)` is awaited to call the model: inline, or in a
    thread."""

    streams = True

    def __init__(
        self, model: SlotModel, *, run: Run, shares_weights: bool, is_deterministic: bool | None = None
    ) -> None:
        """`is_deterministic`: whether a step waits for every call that can come without the world outside, and takes
        calls by their places; by default where weights are shared, because nothing overlaps there."""
        self.model = model
        self.is_deterministic = shares_weights if is_deterministic is None else is_deterministic
        self.scheduler = model.scheduler
        self.run = run
        self.shares_weights = shares_weights
        self.context = model.context
        self.arrivals: list[Request] = []
        self.departures: list[Request] = []
        self.streamed: list[Request] = []
        """Requests whose tokens are reported as they are sampled."""
        self.wake = asyncio.Event()
        self.lock = asyncio.Lock()  # held while the model computes or loads
        self.running = asyncio.Event()
        self.running.set()
        self.driver: asyncio.Task[None] | None = None
        self.coming: set[asyncio.Future[Any]] = set()
        """What may still bring calls, and a deterministic step waits for: grammars that are compiled, and other
        processes that have got an answer."""
        self.answers = count()

    @property
    def seconds(self) -> float:
        """Seconds inside forward passes and sampling."""
        return self.model.model_seconds

    async def open(self) -> None:
        return None

    async def generate(
        self, prompt: Tokens, sampling: Sampling, *, session: str, seed: int, on_tokens: OnTokens | None = None
    ) -> Completion:
        tokens = checked_prompt(prompt, seed, context=self.context, vocabulary=self.model.vocabulary)
        if sampling.max_tokens == 0:
            return nothing(StopReason.length)
        if sampling.routes is not None and self.model.routers is None:
            raise ValueError(NO_ROUTES)
        guide = None if sampling.grammar is None else await self.guide(sampling.grammar)
        if self.driver is None or self.driver.done():
            self.driver = asyncio.create_task(self.drive(), name="slot engine")
        future = asyncio.get_running_loop().create_future()
        request = Request(tokens, sampling, session, seed, future, guide, PLACE.get())
        self.arrivals.append(request)
        self.wake.set()
        try:
            if on_tokens is None:
                return await request.future
            request.on_tokens = on_tokens
            self.streamed.append(request)
            try:
                return await request.future
            finally:
                self.streamed.remove(request)
        except asyncio.CancelledError:
            self.departures.append(request)
            self.wake.set()
            raise
        finally:
            PLACE.set(request.place)

    async def guide(self, grammar: Grammar) -> Guide:
        """What follows a grammar. A new one is compiled in a thread: a hostile one takes long."""
        guidance = self.model.guidance
        if guidance is None:
            raise ValueError(NO_GRAMMARS)
        if guidance.is_compiled(grammar):
            return guidance.guide(grammar)
        compiling = asyncio.ensure_future(asyncio.to_thread(guidance.guide, grammar))
        self.coming.add(compiling)
        try:
            return await compiling
        finally:
            self.coming.discard(compiling)

    async def drive(self) -> None:
        """Step while there is work; every coroutine that can run gets to submit its request before each step."""
        while True:
            if not (self.arrivals or self.departures or self.scheduler.busy):
                self.wake.clear()
                await self.wake.wait()
            await self.wait_for_arrivals()
            while not self.running.is_set():
                await self.running.wait()
            async with self.lock:
                self.hand_over()
                try:
                    finished = await self.run(self.model.step)
                except Exception as error:  # a failed step fails the calls in flight, not the run
                    self.fail(self.scheduler.drop_all(), error)
                    continue
                self.report()
            self.answer(finished)

    async def wait_for_arrivals(self) -> None:
        """Returns when two rounds of the event loop in a row have brought no new request. A deterministic engine waits
        longer: until nobody can run any more, and what may still bring calls has done so. Then neither the time that a
        grammar takes to compile nor the rounds that an environment takes decide which calls share a step."""
        quiet = rounds = 0
        while quiet < 2:
            if self.coming and self.is_deterministic:
                await asyncio.wait(set(self.coming))
                quiet = rounds = 0
            num_arrivals = len(self.arrivals)
            await asyncio.sleep(0)
            rounds = rounds + 1 if len(self.arrivals) == num_arrivals else 0
            is_quiet = not self.is_deterministic or rounds >= MOST_ROUNDS or (is_idle() and not self.coming)
            quiet = quiet + 1 if rounds and is_quiet else 0

    def hand_over(self) -> None:
        for request in self.departures:
            if request in self.arrivals:
                self.arrivals.remove(request)
            self.scheduler.cancel(request)
        if self.is_deterministic:
            self.arrivals.sort(key=lambda request: request.place)
        for request in self.arrivals:
            self.scheduler.submit(request)
        self.arrivals, self.departures = [], []

    def report(self) -> None:
        """Report new tokens of the requests that are streamed. A finished request has its last ones in its
        completion."""
        for request in self.streamed:
            if request.on_tokens is not None and self.scheduler.is_running(request):
                sampled = self.scheduler.state.sampled_after(request.slot, request.num_reported)
                if len(sampled.tokens):
                    if request.guide is not None:
                        sampled = replace(sampled, allowed=request.guide.allowed_after(request.num_reported))
                    request.num_reported += len(sampled.tokens)
                    request.on_tokens(sampled)

    def answer(self, finished: list[Finished]) -> None:
        for request, outcome in finished:
            if request.future.done():
                continue
            request.place = place_after(next(self.answers))
            if isinstance(outcome, Exception):
                request.future.set_exception(outcome)
            else:
                request.future.set_result(outcome)

    def fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            if not request.future.done():
                request.future.set_exception(EngineFailure(f"the engine failed: {error}"))

    async def abort(self, session: str) -> None:
        async with self.lock:
            self.hand_over()
            requests = self.scheduler.cancel_session(session)
            self.answer([(request, request.completion(StopReason.abort)) for request in requests])

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        if isinstance(weights, PartedWeights):
            await asyncio.to_thread(weights.fetch)  # sampling goes on until all of them are here
        async with self.lock:
            with stage("swap"):
                await self.run(self.model.load, {} if self.shares_weights else weights, version)

    async def forget(self) -> None:
        async with self.lock:
            self.scheduler.forget()

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
        self.fail([*self.arrivals, *self.scheduler.drop_all()], RuntimeError("it was closed"))
        self.arrivals = []
