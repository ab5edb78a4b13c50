"""The agent loop: one coroutine per attempt, for training, validation and demonstrations alike."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.engines.base import Completion, Engine, Sampling
from turnwise.engines.noise import seed_of
from turnwise.envs.base import Environment, Reply
from turnwise.rollout.limits import Limits, abridged, text_bytes
from turnwise.rollout.render import Prompt, Renderer
from turnwise.types import Message, Status, Task, Trajectory, Turn

log = logging.getLogger(__name__)
LONGEST_DESCRIPTION = 1000
"""Characters of an error's text that are logged."""
LONG = 1 << 16
"""Bytes of a conversation that is not rendered in the event loop."""
TOO_LARGE = (
    "%s: an observation has more than %d bytes and is not shown; shorten it, or raise rollout.max_observation_bytes"
)
NOT_MANAGED = (
    'the environment handed over no history, which rollout.history = "managed" asks of it every turn; return '
    'Reply(history=...), or set rollout.history = "extend"'
)


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


class Play(Protocol):
    """Who makes the turns of an attempt: opens the environment, fills the record, and says how it ended."""

    async def __call__(
        self,
        which: Attempt,
        environment: Environment,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        limits: Limits,
        clock: Clock,
        record: Record,
    ) -> Status: ...


async def attempt(
    which: Attempt,
    make: Callable[[], Environment],
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    limits: Limits,
    playing: Play | None = None,
) -> Trajectory:
    """One attempt at a task in the environment that `make` makes, whose turns are made by `play` unless another way is
    given. Never raises for what an environment or an engine does: that is a status."""
    record = Record()
    environment: Environment | None = None
    try:
        async with Clock(limits) as clock:
            environment = make()
            turns = playing or play
            record.status = await turns(which, environment, engine, renderer, sampling, limits, clock, record)
    except TimeoutError:
        record.status = Status.timed_out
        log.warning(
            "%s timed out; raise rollout.turn_seconds or rollout.attempt_seconds if that is too soon", which.session
        )
    except BaseException as error:  # the one place where a failure becomes a failed trajectory
        if is_from_outside(error):
            raise
        record.status = Status.failed
        log.warning("%s failed: %s", which.session, described(error))
    finally:
        if environment is not None:
            await close(which, environment, limits, record)
    return record.trajectory(which)


def is_from_outside(error: BaseException) -> bool:
    """Whether somebody else ends the attempt: a person at the keyboard, a cancellation, or a loop that is gone. Where
    nobody does, a CancelledError or GeneratorExit is of the environment's own making, and a failure like any other."""
    kind = type(error)
    if issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        return task is None or (issubclass(kind, asyncio.CancelledError) and task.cancelling() > 0)
    return issubclass(kind, KeyboardInterrupt)


def described(error: BaseException) -> str:
    """An error in one line that can be printed, whatever its own text is."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # the text of an environment's error is code of the environment
        text = "an error that cannot be shown"
    return " ".join(text[:LONGEST_DESCRIPTION].split()).encode("utf-8", "replace").decode()


class Clock:
    """The deadline of an attempt, drawn nearer while one of its calls is under way."""

    def __init__(self, limits: Limits) -> None:
        self.now = asyncio.get_running_loop().time
        self.turn_seconds = limits.turn_seconds
        self.attempt_seconds = limits.attempt_seconds
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

    def end_call(self) -> None:
        """From now on only the attempt as a whole has a deadline."""
        self.timeout.reschedule(self.end)

    def stop(self) -> None:
        """Nothing is due until `start`: the attempt waits for its turn to begin."""
        self.timeout.reschedule(None)

    def start(self) -> None:
        """The attempt begins now."""
        self.end = self.now() + self.attempt_seconds
        self.end_call()


class Record:
    """What an attempt has come to so far."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.status = Status.failed
        self.outcome = 0.0
        self.marks: dict[str, float] = {}

    def pay(self, reply: Reply) -> None:
        self.outcome += reply.outcome
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
    reply = await opened(which, environment, clock, record)
    messages, tools = reply.history or reply.messages, reply.tools or ()
    if text_bytes(messages, tools) > limits.observation_bytes:
        return Status.prompt_too_long
    prompt = await rendered(renderer.first, messages, tools)
    while True:
        room = limits.room_for_action(len(prompt.tokens), engine.context)
        if room == 0:
            return Status.too_long if record.turns else Status.prompt_too_long
        call = replace(sampling, max_tokens=room, stop=(*sampling.stop, *reply.stop))
        seed = which.noise(len(record.turns))
        clock.start_call()
        completion = await engine.generate(prompt.tokens, call, session=which.session, seed=seed)
        said = renderer.said(prompt.tokens, completion.tokens)
        before = clock.now()
        try:
            reply = answered(said.fault, reply) if said.fault else await ask(clock, environment.step, said)
        except BaseException:  # the action that broke the environment is what a penalty must reach
            record.turns.append(recorded(prompt, completion, said, Reply(), clock.now() - before))
            raise
        record.pay(reply)
        too_large = text_bytes(reply.history or reply.messages, reply.tools or ()) > limits.observation_bytes
        turn = recorded(prompt, completion, said, shortened(reply, limits), clock.now() - before)
        record.turns.append(turn)
        if reply.finished:
            return Status.finished
        if len(record.turns) == limits.max_turns:
            return Status.too_many_turns
        if too_large:
            log.warning(TOO_LARGE, which.session, limits.observation_bytes)
            return Status.observation_too_large
        if reply.history is None and renderer.history == "managed" and not said.fault:
            raise EnvironmentFailure(NOT_MANAGED)
        shown, messages = messages, (*messages, said, *reply.messages) if reply.history is None else reply.history
        offered, tools = tools, tools if reply.tools is None else reply.tools
        prompt = await rendered(renderer.next, turn, shown, messages, tools, offered)


async def opened(which: Attempt, environment: Environment, clock: Clock, record: Record) -> Reply:
    """What the environment begins an attempt with; it may pay for the attempt already, and not for a turn."""
    reply = await ask(clock, environment.open, which.task)
    if reply.finished or reply.reward:
        raise EnvironmentFailure("open has finished the attempt or paid for a turn, and there was no turn yet")
    record.pay(reply)
    return reply


def shortened(reply: Reply, limits: Limits) -> Reply:
    """What is recorded of a reply: of one that is too large its beginning."""
    is_large = text_bytes(reply.messages) > limits.observation_bytes
    return replace(reply, messages=abridged(reply.messages)) if is_large else reply


async def rendered(render: Callable[..., Prompt], *given: Any) -> Prompt:
    """A prompt. A long conversation is rendered in a thread: tokenising a megabyte takes seconds, in which no other
    attempt would get anywhere."""
    told = [one for one in given if isinstance(one, tuple) and one and isinstance(one[0], Message)]
    size = sum(map(text_bytes, told)) + sum(len(one) for one in given if isinstance(one, str))
    return await asyncio.to_thread(render, *given) if size > LONG else render(*given)


def answered(fault: str, before: Reply) -> Reply:
    """What the model hears of a call that could not be read; the environment only ever hears those that could."""
    return Reply((Message("user", fault),), stop=before.stop)


def recorded(prompt: Prompt, completion: Completion, said: Message, reply: Reply, seconds: float) -> Turn:
    return Turn(
        prompt=prompt.tokens,
        action=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        stop=completion.stop,
        reward=reply.reward,
        said=said,
        heard=reply.messages,
        timing=replace(completion.timing, environment=seconds),
        broke=prompt.broke,
    )


async def ask(clock: Clock, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Reply:
    """The environment's answer, within the deadline of a call and checked to be one."""
    clock.start_call()
    return checked(await call(method, *arguments), method)


def checked(answer: Any, method: Callable[..., Any]) -> Reply:
    """The answer as a Reply of our own making: a subclass can skip the checks, or compute its fields anew whenever they
    are read."""
    if not issubclass(type(answer), Reply):
        raise EnvironmentFailure(f"{name_of(method)} must return a Reply, got {type(answer).__name__}")
    return Reply(**{name: getattr(answer, name) for name in Reply.__slots__})


def name_of(method: Callable[..., Any]) -> str:
    """For messages and threads; not every callable has a name."""
    return str(getattr(method, "__qualname__", type(method).__name__))


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
            set_it, value = future.set_exception, EnvironmentFailure(described(error))
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(answer, set_it, value)

    threading.Thread(target=work, daemon=True, name=name_of(method)).start()
    return await future


async def close(which: Attempt, environment: Environment, limits: Limits, record: Record) -> None:
    """Close the environment whatever happened; a late reply may pay."""
    try:
        async with asyncio.timeout(limits.turn_seconds):
            answer = await call(environment.close)
        if answer is not None:
            reply = checked(answer, environment.close)
            record.pay(reply)
            record.outcome += reply.reward
    except BaseException as error:
        if is_from_outside(error):
            raise
        log.warning("%s: closing the environment failed: %s", which.session, described(error))
        if record.status.counts:
            record.status = Status.failed
