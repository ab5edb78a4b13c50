"""The agent loop: one coroutine per attempt, for training, validation and demonstrations alike."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.engines.base import Completion, Engine, Sampling
from turnwise.envs.base import Environment, Reply
from turnwise.envs.raised import Raised, carrying, home_of
from turnwise.rollout.blame import blamed_task, border
from turnwise.rollout.failures import Failures
from turnwise.rollout.leaving import leave_behind
from turnwise.rollout.limits import Limits, abridged, text_bytes
from turnwise.rollout.places import Supply, supplied
from turnwise.rollout.render.renderer import Prompt, Renderer
from turnwise.seeds import seed_of
from turnwise.types import Message, Status, Task, Trajectory, Turn

log = logging.getLogger(__name__)
LONGEST_DESCRIPTION = 1000
"""Characters of an error's text that are logged."""
MOST_HANGING = 256
"""Threads that calls may leave behind; no more are begun before some of them have ended."""
TOO_SOON = "raise rollout.turn_seconds or rollout.attempt_seconds if that is too soon"
NO_ROOM = "the first prompt does not fit: raise rollout.max_prompt_tokens or rollout.max_trajectory_tokens"
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


class Blocked(BaseException):
    """Raised inside environment code that has held up the event loop for too long. It is no Exception, because that is
    what environments catch."""


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
    given. It waits for a place first, and nothing of it has begun before it has one."""
    supply = supplied(make)
    async with supply.places.one():
        return await attempt_in_place(which, supply, engine, renderer, sampling, limits, playing)


async def attempt_in_place(
    which: Attempt,
    supply: Supply,
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    limits: Limits,
    playing: Play | None,
) -> Trajectory:
    """The attempt once it has a place. Never raises for what an environment or an engine does: that is a status. One
    whose environment does not even let itself be cancelled has timed out, and goes on by itself in a task that nobody
    waits for."""
    record, clock = Record(which, supply.failures), Clock(limits)
    work = attempt_in_time(which, supply, engine, renderer, sampling, limits, playing, clock, record)
    task = asyncio.create_task(work, name=which.session)
    try:
        await asyncio.wait((task, clock.overdue), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        clock.hurry()
        await asyncio.wait((task, clock.overdue), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            leave_behind(task)
        raise
    finally:
        task.cancel()
        clock.forget()
    if not task.done():
        leave_behind(task)
        record.status, record.failure = Status.timed_out, f"not cancelled at {blamed_task(task)}: it is left behind"
    elif not task.cancelled():
        task.result()
    return record.trajectory()


async def attempt_in_time(
    which: Attempt,
    make: Callable[[], Environment],
    engine: Engine,
    renderer: Renderer,
    sampling: Sampling,
    limits: Limits,
    playing: Play | None,
    clock: Clock,
    record: Record,
) -> None:
    """The attempt itself, within its deadlines; the record says what came of it."""
    environment: Environment | None = None
    try:
        async with clock:
            environment = made(make)
            turns = playing or play
            record.status = await turns(which, environment, engine, renderer, sampling, limits, clock, record)
    except TimeoutError as error:
        record.fail(Status.timed_out, "timed out", error, TOO_SOON)
    except Blocked as error:
        record.fail(Status.timed_out, "timed out", error)
    except BaseException as error:  # the one place where a failure becomes a failed trajectory
        if is_from_outside(error):
            raise
        record.fail(Status.failed, "failed", error)
    finally:
        if environment is not None:
            clock.closing = True
            clock.allow(clock.now() + limits.turn_seconds)
            await close(environment, limits, record)


@border
def made(make: Callable[[], Environment]) -> Environment:
    return make()


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
    if issubclass(kind, KeyboardInterrupt):  # which no person can raise while Ctrl-C is a question
        return not getattr(signal.getsignal(signal.SIGINT), "asks", False)
    return False


def is_deadline(error: BaseException) -> bool:
    """Whether it is us who ended a call, and no error of the environment's own."""
    late = issubclass(type(error), TimeoutError) and issubclass(type(error.__cause__), asyncio.CancelledError)
    return late or issubclass(type(error), Blocked)


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
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.grace = limits.grace
        self.turn_seconds = limits.turn_seconds
        self.attempt_seconds = limits.attempt_seconds
        self.end = self.now() + limits.attempt_seconds
        self.timeout = asyncio.timeout_at(self.end)
        self.overdue: asyncio.Future[None] = self.loop.create_future()
        """Done when a deadline has passed and what it should have ended goes on."""
        self.last: asyncio.TimerHandle | None = None
        self.closing = False
        self.allow(self.end)

    async def __aenter__(self) -> Clock:
        await self.timeout.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.timeout.__aexit__(*error)

    def start_call(self) -> None:
        """From now on the call that follows has its own deadline."""
        self.set(min(self.end, self.now() + self.turn_seconds))

    def end_call(self) -> None:
        """From now on only the attempt as a whole has a deadline."""
        self.set(self.end)

    def stop(self) -> None:
        """Nothing is due until `start`: the attempt waits for its turn to begin."""
        self.set(None)

    def set(self, when: float | None) -> None:
        if self.overdue.done():  # nobody waits for this attempt any more
            raise asyncio.CancelledError
        self.timeout.reschedule(when)
        self.allow(when)

    def allow(self, when: float | None) -> None:
        """Have the attempt end by then, or be left behind a little later."""
        self.forget()
        self.last = None if when is None else self.loop.call_at(when + self.grace, self.give_up)

    def hurry(self) -> None:
        """The attempt was cancelled: it has no more time than it takes to begin closing its environment."""
        if not self.closing:
            self.allow(self.now())

    def give_up(self) -> None:
        if not self.overdue.done():
            self.overdue.set_result(None)

    def forget(self) -> None:
        if self.last is not None:
            self.last.cancel()

    def start(self) -> None:
        """The attempt begins now."""
        self.end = self.now() + self.attempt_seconds
        self.end_call()


class Record:
    """What an attempt has come to so far."""

    def __init__(self, which: Attempt, failures: Failures) -> None:
        self.which = which
        self.failures = failures
        self.turns: list[Turn] = []
        self.status = Status.failed
        self.failure = ""
        self.outcome = 0.0
        self.marks: dict[str, float] = {}

    def pay(self, reply: Reply) -> None:
        self.outcome += reply.outcome
        self.marks.update(reply.marks)
        for raised in reply.raised:
            self.failures.note(f"{self.which.session} went on after an error", raised)

    def fail(self, status: Status, how: str, error: BaseException, advice: str = "") -> None:
        """The attempt does not count; what ended it first is why."""
        raised = Raised.of(error)
        if is_deadline(error):  # the line it waited in says it all
            raised = replace(raised, traceback="")
        self.failures.note(f"{self.which.session} {how}", raised, advice)
        if self.status.counts or (self.status is Status.failed and not self.failure):
            self.status, self.failure = status, raised.line

    def trajectory(self) -> Trajectory:
        """The attempt as it ended; one whose pay adds up to no finite number has failed."""
        turns = tuple(self.turns)
        failure = NO_ROOM if self.status is Status.prompt_too_long else self.failure
        try:
            return Trajectory(turns, self.status, self.outcome, self.marks, failure)
        except ValueError as error:
            self.fail(Status.failed, "failed", error)
            return Trajectory((), Status.failed, failure=self.failure)


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
        text = f"{name_of(method)} must return a Reply, got {type(answer).__name__}"
        raise carrying(EnvironmentFailure(text), Raised("EnvironmentFailure", home_of(method), text, ""))
    return Reply(**{name: getattr(answer, name) for name in Reply.__slots__})


def name_of(method: Callable[..., Any]) -> str:
    """For messages and threads; not every callable has a name."""
    return str(getattr(method, "__qualname__", type(method).__name__))


@border
async def call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Await a coroutine function; run a plain one in a thread, so that a blocking environment holds up nobody else."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await in_thread(method, *arguments)


hanging: set[threading.Thread] = set()
"""Threads whose callers have given up."""


async def in_thread(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a daemon thread of its own: one that never returns delays neither its deadline nor the process's end."""
    hanging.difference_update([thread for thread in hanging if not thread.is_alive()])
    if len(hanging) >= MOST_HANGING:
        text = f"{len(hanging)} calls of environments hang; give what they wait for a time-out of its own"
        raise carrying(EnvironmentFailure(text), Raised("EnvironmentFailure", home_of(method), text, ""))
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def answer(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def work() -> None:
        try:
            set_it, value = future.set_result, method(*arguments)
        except BaseException as error:  # a future refuses StopIteration, and a thread's SystemExit goes nowhere
            # What was raised goes along as text: the error itself would keep the frames of its thread alive.
            set_it, value = future.set_exception, carrying(EnvironmentFailure(described(error)), Raised.of(error))
        with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
            loop.call_soon_threadsafe(answer, set_it, value)

    thread = threading.Thread(target=work, daemon=True, name=name_of(method))
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        hanging.add(thread)
        raise


async def close(environment: Environment, limits: Limits, record: Record) -> None:
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
        record.fail(Status.failed, "failed to close its environment", error)
