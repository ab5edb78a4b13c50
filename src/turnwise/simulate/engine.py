"""A simulated engine: replicas that decode what they run together, prefill what arrives, and pause for new weights."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.simulate.pace import EnginePace


@dataclass(slots=True, eq=False)
class Call:
    """A turn that an engine is asked for."""

    session: str
    shared: str
    """Whose first prompt this is: the attempts of a group have one."""
    prompt: int
    """Tokens of the whole prompt."""
    is_first: bool
    """Whether it is the first prompt of an attempt."""
    action: int
    """Tokens to sample."""
    done: asyncio.Future[None]
    began: int = 0
    """The replica's iteration at which it began."""
    spans: Sequence[tuple[int, int]] = ()
    """(version, tokens sampled with it) in order, once it is done."""

    @property
    def length(self) -> int:
        """Tokens of its text at its end."""
        return self.prompt + self.action


class Replica:
    """One copy of the model. Time passes in stretches in which nothing changes: all running calls get tokens at the
    pace of their number, until one of them ends, a call arrives or weights are loaded."""

    def __init__(self, pace: EnginePace, max_sequences: int, room: float) -> None:
        self.pace, self.max_sequences, self.room = pace, max_sequences, room
        self.sessions = 0
        self.waiting: deque[Call] = deque()
        self.running: list[tuple[int, int, Call]] = []
        """A heap of (iteration at which it ends, number of the call, call)."""
        self.admissions = 0
        self.iterations = 0
        self.versions = [(0, 0)]
        """(version, iteration from which tokens are sampled with it) in order."""
        self.context = 0
        """Tokens of the texts of all running calls."""
        self.held = 0
        """Tokens of these texts at their ends."""
        self.idle: OrderedDict[str, int] = OrderedDict()
        """Tokens of texts whose keys are kept between turns, those used longest ago first."""
        self.kept = 0
        """Their sum."""
        self.change = asyncio.Event()
        self.loading = False
        self.busy = 0.0
        """Seconds in which it computed."""
        self.decoded = 0
        """Tokens."""

    def submit(self, call: Call) -> None:
        if call.length > self.room:
            raise ValueError(f"a text of {call.length} tokens fits in no replica: {self.room:.0f} do")
        self.waiting.append(call)
        self.change.set()

    async def drive(self) -> None:
        while True:
            if self.loading or not (self.waiting or self.running):
                self.change.clear()
                await self.change.wait()
            elif self.can_admit():
                await self.prefill()
            else:
                await self.decode()

    def can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_sequences:
            return False
        return self.held + self.waiting[0].length <= self.room

    async def prefill(self) -> None:
        """Compute the prompts of all calls that can start now, in the order they came."""
        tokens = calls = 0
        while self.can_admit():
            call = self.waiting.popleft()
            known = self.forget(call.session) or self.idle.get(call.shared, 0)
            tokens += max(0, call.prompt - known)
            calls += 1
            if call.is_first:
                self.keep(call.shared, call.prompt)
            call.began = self.iterations
            self.admissions += 1
            heapq.heappush(self.running, (self.iterations + call.action, self.admissions, call))
            self.context += call.prompt
            self.held += call.length
        self.evict()
        seconds = self.pace.prefill(tokens, calls)
        self.busy += seconds
        await asyncio.sleep(seconds)

    async def decode(self) -> None:
        """Give every running call a token in each iteration, until one ends or something changes."""
        num_running = len(self.running)
        iteration = self.pace.iteration(num_running, self.context)
        tokens = self.running[0][0] - self.iterations
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.change.clear()
        try:
            async with asyncio.timeout(tokens * iteration):
                await self.change.wait()
            if iteration:
                tokens = min(tokens, max(1, math.ceil((loop.time() - began) / iteration - 1e-9)))
            await asyncio.sleep(max(0.0, began + tokens * iteration - loop.time()))  # the iteration that had begun
        except TimeoutError:
            pass
        self.busy += loop.time() - began
        self.iterations += tokens
        self.decoded += tokens * num_running
        self.context += tokens * num_running
        while self.running and self.running[0][0] <= self.iterations:
            self.finish(heapq.heappop(self.running)[2])
        self.evict()

    def finish(self, call: Call) -> None:
        call.spans = self.spans_of(call)
        self.context -= call.length
        self.held -= call.length
        self.keep(call.session, call.length)
        call.done.set_result(None)

    def spans_of(self, call: Call) -> list[tuple[int, int]]:
        """How many tokens of a call each version sampled."""
        spans, end = [], call.began + call.action
        for version, start in reversed(self.versions):
            if end > max(start, call.began):
                spans.append((version, end - max(start, call.began)))
                end = max(start, call.began)
            if start <= call.began:
                break
        return spans[::-1]

    def load(self, version: int) -> None:
        self.versions.append((version, self.iterations))

    def keep(self, name: str, tokens: int) -> None:
        self.forget(name)
        self.idle[name] = tokens
        self.kept += tokens

    def forget(self, name: str) -> int:
        """How many tokens of a text were kept."""
        tokens = self.idle.pop(name, 0)
        self.kept -= tokens
        return tokens

    def evict(self) -> None:
        while self.idle and self.kept > self.room - self.held:
            self.kept -= self.idle.popitem(last=False)[1]


class SimulatedEngine:
    """Replicas behind a router that sends an attempt to the one with the fewest attempts, and stays with it."""

    def __init__(self, pace: EnginePace, replicas: int, max_sequences: int, room: float, load: float) -> None:
        self.replicas = [Replica(pace, max_sequences, room) for _ in range(replicas)]
        self.seconds_of_load = load
        self.tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        self.tasks = [asyncio.create_task(replica.drive(), name="replica") for replica in self.replicas]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def route(self) -> Replica:
        replica = min(self.replicas, key=lambda each: each.sessions)
        replica.sessions += 1
        return replica

    async def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Pause, take the weights, go on. Calls in flight keep their keys and values."""
        for replica in self.replicas:
            replica.loading = True
            replica.change.set()
        await asyncio.sleep(self.seconds_of_load)
        for replica in self.replicas:
            replica.loading = False
            replica.load(version)
            replica.change.set()
