"""Environments whose calls are batched: a wrapper around the environment border, so that the agent loop stays one.

A class that can serve several of its environments in one call has `step_many`, `close_many` or both (see
`turnwise.envs.capabilities`). They may be coroutine functions or plain ones; plain ones run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from turnwise.envs.base import Environment, Reply
from turnwise.envs.capabilities import closes_many, is_batchable, is_idempotent, steps_many
from turnwise.envs.raised import error_line
from turnwise.messages import Message
from turnwise.recipe.environment import BatchingConfig
from turnwise.rollout.batching.flush import Adaptive, Lockstep, Rule
from turnwise.rollout.batching.microbatch import Lane, MicroBatcher
from turnwise.rollout.calls import EnvironmentFailure, call, checked, is_from_outside, name_of
from turnwise.rollout.failures import Failures
from turnwise.rollout.open_limit import EnvironmentMaker, OpenLimit, default_open_limit
from turnwise.types import Task

PATIENCE = 0.5
"""How long validation holds a call back unless a recipe says so, in fitted prices of a call: a whole one would save
more calls, and cost attempts of like length a tenth of their time (regime F of benchmarks/env_batching.py)."""


def rule_of(settings: BatchingConfig) -> Rule:
    """The rule that decides when queues are flushed, from a recipe's policy."""
    rules: dict[str, Rule] = {
        "adaptive": Adaptive(settings.max_batch),
        "lockstep": Lockstep(),
        "per_attempt": Adaptive(max_batch=1),
    }
    return rules[settings.policy]


def lane_of(settings: BatchingConfig, *, validation: bool) -> Lane:
    """The lane of training or validation. Validation goes second and can be held back for larger calls."""
    if settings.max_wait == "auto":
        return Lane(rank=1, max_wait_prices=PATIENCE) if validation else Lane(rank=0)
    return Lane(rank=int(validation), max_wait=settings.max_wait)


class Batches:
    """The queues of one class of environments, shared by training and validation. An `EnvironmentHost`.

    Example:
        batches = Batches(Judged, rule=Adaptive(max_batch=64), slots=8, call_seconds=120.0)
        make = batches.wrap(Judged, Lane(rank=1, max_wait=2.0))
    """

    def __init__(
        self,
        kind: Any,
        *,
        rule: Rule,
        slots: int,
        call_seconds: float | None,
        open_limit: OpenLimit | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.kind = kind
        self.call_seconds = call_seconds
        self.open_limit = open_limit or OpenLimit(default_open_limit(kind))
        """For all environments of the class together. Attempts that wait for a permit take no part in the queues."""
        self.failures = failures or Failures()
        is_batchable(kind)

        def queue(method: Callable[..., Any], serve: Callable[[list[Any]], Any]) -> MicroBatcher[Any, Any]:
            return MicroBatcher(
                serve,
                rule=rule,
                slots=slots,
                idempotent=is_idempotent(kind),
                call_seconds=call_seconds,
                name=name_of(method),
            )

        self.steps: MicroBatcher[tuple[Batched, Message], Any] | None = None
        self.closes: MicroBatcher[Batched, Any] | None = None
        if steps_many(kind):
            self.steps = queue(kind.step_many, self.step_many)
        if closes_many(kind):
            self.closes = queue(kind.close_many, self.close_many)
        self.closing: set[asyncio.Task[Reply | None]] = set()

    def wrap(self, make: Callable[[], Environment], lane: Lane) -> EnvironmentMaker:
        """Makes environments whose calls go through the queues; those of `make` itself if there are no queues."""
        return EnvironmentMaker(self.maker(make, lane), self.open_limit, self.failures)

    def maker(self, make: Callable[[], Environment], lane: Lane) -> Callable[[], Environment]:
        if self.steps is None and self.closes is None:
            return make
        return lambda: Batched(make(), self, lane)

    async def step_many(self, asked: list[tuple[Batched, Message]]) -> Any:
        together = [batched for batched, _ in asked]
        for batched in together:
            batched.idle.clear()
        try:
            environments = [batched.environment for batched in together]
            return await call(self.kind.step_many, environments, [message for _, message in asked])
        finally:
            for batched in together:
                batched.idle.set()

    async def close_many(self, together: list[Batched]) -> Any:
        return await call(self.kind.close_many, [batched.environment for batched in together])

    def report(self) -> dict[str, float]:
        """Metrics of both queues since the last report."""
        queues = {"step": self.steps, "close": self.closes}
        return {
            f"{name}/{key}": value
            for name, queue in queues.items()
            if queue is not None
            for key, value in queue.report().items()
        }

    def close(self) -> None:
        """Nothing is left to end: every environment is closed by its own attempt."""


class Batched:
    """`Environment` that steps and closes together with others of its class."""

    def __init__(self, environment: Environment, batches: Batches, lane: Lane) -> None:
        self.environment = environment
        self.batches = batches
        self.lane = lane
        self.idle = asyncio.Event()
        self.idle.set()
        self.opened = False

    async def open(self, task: Task) -> Reply:
        """From now until it closes, other items may wait for this attempt's next call."""
        self.opened = True
        for queue in (self.batches.steps, self.batches.closes):
            if queue is not None:
                queue.enter()
        answer: Reply = await call(self.environment.open, task)
        return answer

    async def step(self, message: Message) -> Reply:
        if self.batches.steps is None:
            return checked(await call(self.environment.step, message), self.environment.step)
        return checked(await self.batches.steps.submit((self, message), self.lane), self.batches.kind.step_many)

    async def close(self) -> Reply | None:
        """Close even if the caller is cancelled or out of time: the environment must not stay open."""
        entered, self.opened = self.opened, False
        if entered and self.batches.steps is not None:
            self.batches.steps.leave()  # no step follows, and other items must not wait for one
        closing = asyncio.create_task(self.close_when_idle(entered))
        self.batches.closing.add(closing)
        closing.add_done_callback(self.closed)
        return await asyncio.shield(closing)

    async def close_when_idle(self, entered: bool) -> Reply | None:
        """Close as soon as a step that its caller abandoned has ended."""
        closes = self.batches.closes
        try:
            await self.idle.wait()
            if closes is not None:
                answer, method = await closes.submit(self, self.lane), self.batches.kind.close_many
            else:
                async with asyncio.timeout(self.batches.call_seconds):
                    answer, method = await call(self.environment.close), self.environment.close
            return None if answer is None else checked(answer, method)
        except (SystemExit, GeneratorExit) as error:  # they would end more than this task
            if is_from_outside(error):
                raise
            raise EnvironmentFailure(error_line(error)) from error
        finally:
            if entered and closes is not None:
                closes.leave()

    def closed(self, closing: asyncio.Task[Reply | None]) -> None:
        self.batches.closing.discard(closing)
        if not closing.cancelled():
            closing.exception()  # retrieved, so that asyncio does not report it
