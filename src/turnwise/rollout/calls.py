"""Calls of environment code: awaited or in a thread, within a deadline, and with a checked answer."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from turnwise.envs.base import Reply, is_plain
from turnwise.envs.daemon_threads import DaemonThreads
from turnwise.envs.raised import Raised, carrying, error_line, home_of
from turnwise.rollout.blame import border
from turnwise.rollout.deadline import Deadline

threads = DaemonThreads("environments", most_hanging=256)


class EnvironmentFailure(RuntimeError):
    """The environment raised or answered nonsense."""


async def ask(deadline: Deadline, method: Callable[..., Awaitable[Any]], *arguments: Any) -> Reply:
    """The checked answer of an environment's method, within the deadline of one call."""
    deadline.start_call()
    reply = checked(await call(method, *arguments), method)
    if reply.seats:
        raise failure_of(method, "the environment answers for several seats, which its class does not say by `models`")
    return reply


@border
async def call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Await a coroutine function; run a plain function in a thread, so that it cannot block other attempts."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await in_thread(method, *arguments)


async def in_thread(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call in a daemon thread. A call that never returns delays neither its deadline nor the end of the process."""
    if complaint := threads.complaint():
        raise failure_of(method, complaint)
    return await threads.run(lambda: method(*arguments), name_of(method), as_failure)


def as_failure(error: BaseException) -> EnvironmentFailure:
    """What a thread's caller gets: a future refuses StopIteration, and SystemExit would end the thread unnoticed. The
    original goes along as text, because the exception itself would keep the frames of its thread alive."""
    return carrying(EnvironmentFailure(error_line(error)), Raised.of(error))


def checked(answer: Any, method: Callable[..., Any]) -> Reply:
    """The answer as a plain Reply. One that is not plain to the last value is copied into one: a subclass could skip
    the checks, or compute its fields anew at every read."""
    if not issubclass(type(answer), Reply):
        raise failure_of(method, f"{name_of(method)} must return a Reply, got {type(answer).__name__}")
    if is_plain(answer):
        return answer  # type: ignore[no-any-return]
    return Reply(**{name: getattr(answer, name) for name in Reply.__slots__})


def failure_of(method: Callable[..., Any], text: str) -> EnvironmentFailure:
    """A failure that names where a method is defined."""
    return carrying(EnvironmentFailure(text), Raised("EnvironmentFailure", home_of(method), text, ""))


def name_of(method: Callable[..., Any]) -> str:
    """A name for messages and threads; not every callable has one."""
    return str(getattr(method, "__qualname__", type(method).__name__))


def is_from_outside(error: BaseException) -> bool:
    """Whether somebody outside the environment ends the attempt: a person at the keyboard, a cancellation, or an event
    loop that is gone. Otherwise the environment itself raised the CancelledError or GeneratorExit, and that is a
    failure like any other."""
    kind = type(error)
    if issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
        try:
            task = asyncio.current_task()
        except RuntimeError:
            task = None
        return task is None or (issubclass(kind, asyncio.CancelledError) and task.cancelling() > 0)
    if issubclass(kind, KeyboardInterrupt):  # no person can raise it while Ctrl-C only asks, or in another thread
        here = threading.current_thread() is threading.main_thread()
        return here and not getattr(signal.getsignal(signal.SIGINT), "asks", False)
    return False
