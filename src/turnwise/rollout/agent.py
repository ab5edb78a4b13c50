"""The agent loop: one coroutine per attempt, for training, validation and demonstrations alike."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from turnwise.engines.base import Completion, Engine, Sampling
from turnwise.engines.noise import seed_of
from turnwise.envs.base import Environment, Reply
from turnwise.rollout.limits import Limits
from turnwise.rollout.render import Prompt, Renderer
from turnwise.types import Message, Status, Task, Trajectory, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt this is: what its sampling noise depends on, and nothing else.

    Example:
        Attempt(seed=0, split="train", task=task, visit=2, number=5, retry=0)
    """

    seed: int
    split: str
    task: Task
    visit: int = 0
    """How often the task was met before."""
    number: int = 0
    """Place in the group."""
    retry: int = 0

    def noise(self, turn: int) -> int:
        return seed_of(
            self.seed, self.split, self.task.dataset, self.task.id, self.visit, self.number, self.retry, turn
        )

    @property
    def session(self) -> str:
        return f"{self.split}/{self.task.dataset}/{self.task.id}/{self.visit}/{self.number}/{self.retry}"


class EnvironmentFailure(RuntimeError):
    """The environment raised or answered nonsense."""


async def attempt(
    which: Attempt,
    make: Callable[[], Environment],
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    limits: Limits,
) -> Trajectory:
    """One attempt at a task in the environment that `make` makes. Never raises for what an environment or an engine
    does: that is a status."""
    record = Record()
    environment: Environment | None = None
    try:
        async with Clock(limits) as clock:
            environment = make()
            record.status = await play(which, environment, engine, renderer, sampling, limits, clock, record)
    except TimeoutError:
        record.status = Status.timed_out
        log.warning(
            "%s timed out; raise rollout.turn_seconds or rollout.attempt_seconds if that is too soon", which.session
        )
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # The one place where a failure becomes a failed trajectory. A cancellation counts as one only where nobody
        # has cancelled the attempt: then it is of the environment's own making.
        if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
            raise
        record.status = Status.failed
        log.warning("%s failed: %s: %s", which.session, type(error).__name__, error)
    finally:
        if environment is not None:
            await close(which, environment, limits, record)
    return record.trajectory(which)


def is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Clock:
    """The deadline of an attempt, drawn nearer while one of its calls is under way."""

    def __init__(self, limits: Limits) -> None:
        self.now = asyncio.get_running_loop().time
        self.turn_seconds = limits.turn_seconds
        self.end = self.now() + limits.attempt_seconds
        self.timeout = asyncio.timeout_at(self.end)

    async def __aenter__(self) -> Clock:
        await self.timeout.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.timeout.__aexit__(*error)

    def start_call(self) -> None:
        """From now on the call that follows has its own deadline."""
        self.timeout.reschedule(min(self.end, self.now() + self.turn_seconds))


class Record:
    """What an attempt has come to so far."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.status = Status.failed
        self.outcome = 0.0
        self.marks: dict[str, float] = {}

    def pay(self, reply: Reply) -> None:
        self.outcome += float(reply.outcome)
        self.marks.update(reply.marks)

    def trajectory(self, which: Attempt) -> Trajectory:
        """The attempt as it ended; one whose pay adds up to no finite number has failed."""
        turns = tuple(self.turns)
        try:
            return Trajectory(turns, self.status, self.outcome, self.marks)
        except ValueError as error:
            log.warning("%s failed: %s", which.session, error)
            return Trajectory((), Status.failed)


async def play(
    which: Attempt,
    environment: Environment,
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    limits: Limits,
    clock: Clock,
    record: Record,
) -> Status:
    """Per turn: render the prompt, check the limits on that prompt, generate, step the environment, record."""
    reply = await ask(clock, environment.open, which.task)
    if reply.finished or reply.reward:
        raise EnvironmentFailure("open has finished the attempt or paid for a turn, and there was no turn yet")
    record.pay(reply)
    messages = reply.history or reply.messages
    prompt = renderer.first(messages)
    while True:
        room = limits.room_for_action(len(prompt.tokens), engine.context)
        if room == 0:
            return Status.too_long if record.turns else Status.prompt_too_long
        call = replace(sampling, max_tokens=room, stop=(*sampling.stop, *reply.stop))
        seed = which.noise(len(record.turns))
        clock.start_call()
        completion = await engine.generate(prompt.tokens, call, session=which.session, seed=seed)
        said = renderer.said(completion.tokens)
        before = time.perf_counter()
        reply = await ask(clock, environment.step, said)
        record.pay(reply)
        turn = recorded(prompt, completion, said, reply, time.perf_counter() - before)
        record.turns.append(turn)
        if reply.finished:
            return Status.finished
        if len(record.turns) == limits.max_turns:
            return Status.too_many_turns
        messages = (*messages, said, *reply.messages) if reply.history is None else reply.history
        prompt = renderer.next(turn, messages, reply.messages, replaced=reply.history is not None)


def recorded(prompt: Prompt, completion: Completion, said: Message, reply: Reply, seconds: float) -> Turn:
    return Turn(
        prompt=prompt.tokens,
        action=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        stop=completion.stop,
        reward=float(reply.reward),
        said=said,
        heard=reply.messages,
        timing=replace(completion.timing, environment=seconds),
    )


async def ask(clock: Clock, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Reply:
    """The environment's answer, within the deadline of a call and checked to be one."""
    clock.start_call()
    answer = await call(method, *arguments)
    if not isinstance(answer, Reply):
        raise EnvironmentFailure(f"{method.__qualname__} must return a Reply, got {type(answer).__name__}")
    return answer


async def call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Await a coroutine function; run a plain one in a thread, so that a blocking environment holds up nobody else."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await in_thread(method, *arguments)


async def in_thread(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a daemon thread of its own: one that never returns delays neither its deadline nor the process's end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def answer(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def work() -> None:
        try:
            set_it, value = future.set_result, method(*arguments)
        except BaseException as error:  # a future refuses StopIteration, and a thread's SystemExit goes nowhere
            set_it, value = future.set_exception, EnvironmentFailure(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(answer, set_it, value)

    threading.Thread(target=work, daemon=True, name=method.__qualname__).start()
    return await future


async def close(which: Attempt, environment: Environment, limits: Limits, record: Record) -> None:
    """Close the environment whatever happened; a late reply may pay."""
    try:
        async with asyncio.timeout(limits.turn_seconds):
            reply = await call(environment.close)
        if isinstance(reply, Reply):
            record.pay(reply)
            record.outcome += float(reply.reward)
        elif reply is not None:
            raise EnvironmentFailure(f"close must return a Reply or None, got {type(reply).__name__}")
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
            raise
        log.warning("%s: closing the environment failed: %s: %s", which.session, type(error).__name__, error)
        if record.status.counts:
            record.status = Status.failed
