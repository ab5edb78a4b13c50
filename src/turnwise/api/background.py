"""Work in a thread with an event loop of its own, attended by the thread that started it.

A notebook has a running event loop and a script has none; both may start a run. Callbacks are called where the run was
started: a notebook's plots and a script's databases belong to that thread.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from turnwise.rollout.leaving import end_all
from turnwise.schedule.run_loop import RunLoop
from turnwise.schedule.watchdog import GRACE

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PendingCallback:
    """A call that waits for the thread that attends."""

    function: Callable[..., Any]
    argument: Any
    answer: Future[Any] = field(default_factory=Future)

    def make(self) -> None:
        try:
            self.answer.set_result(self.function(self.argument))
        except Exception as error:
            self.answer.set_exception(error)

    async def make_in_loop(self) -> None:
        """The same in an event loop, for functions and coroutine functions."""
        try:
            made = self.function(self.argument)
            self.answer.set_result(await made if inspect.isawaitable(made) else made)
        except Exception as error:
            self.answer.set_exception(error)

    def leave(self) -> None:
        """Answer nothing: whoever attends has been interrupted meanwhile."""
        if not self.answer.done():
            self.answer.set_result(None)


class Background(Generic[Result]):
    """Work in a thread, until it ends or is asked to stop. It never ends the process.

    The first interruption (Ctrl-C, or the interrupt button of a notebook) sets `stop` where the work has something to
    lose, which then ends by itself, and cancels it where not; the second cancels it; the third gives up on it.

    Example:
        summary = Background(lambda background: train(background.stop)).attend()
    """

    def __init__(self, work: Callable[[Background[Result]], Coroutine[Any, Any, Result]]) -> None:
        self.work = work
        self.has_something_to_lose = False
        """Whether the work ends by itself soon after `stop` is set, with less lost than if it were cancelled."""
        self.loop: asyncio.AbstractEventLoop = RunLoop()
        self.stop = asyncio.Event()
        self.task: asyncio.Task[Result] | None = None
        self.outcome: Future[Result] = Future()
        context = copy_context()
        self.thread = threading.Thread(target=context.run, args=(self.run,), name="turnwise", daemon=True)

    # ------------------------------------------------------------ its own thread

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                self.outcome.set_result(runner.run(self.attended()))
        except BaseException as error:
            self.outcome.set_exception(error)
        finally:
            self.post(None)

    async def attended(self) -> Result:
        self.task = asyncio.create_task(self.work(self), name="work")
        try:
            return await self.task
        finally:
            await end_all(GRACE)

    async def call(self, function: Callable[..., Any], argument: Any) -> Any:
        """What a function returns when the attending thread calls it."""
        call = PendingCallback(function, argument)
        self.post(call)
        return await asyncio.wrap_future(call.answer)

    # ------------------------------------------------------------ the thread that attends

    def attend(self) -> Result:
        """The result of the work, for which this thread waits. KeyboardInterrupt where a person stopped it."""
        mail: SimpleQueue[PendingCallback | None] = SimpleQueue()
        self.post: Callable[[PendingCallback | None], None] = mail.put
        self.thread.start()
        interruptions: list[BaseException] = []
        call: PendingCallback | None = None
        while True:
            try:
                while (call := mail.get()) is not None:
                    call.make()
                break
            except BaseException as interruption:  # a person's, or a callback that ends the program
                interruptions.append(interruption)
                if len(interruptions) > 2:
                    raise
                self.ask_to_stop(at_once=len(interruptions) > 1)
                if call is not None:
                    call.leave()
        self.thread.join()
        if interruptions:
            raise interruptions[0]
        return self.outcome.result()

    async def attend_in_loop(self) -> Result:
        """The same from a running event loop, which goes on. Where the caller is cancelled, so is the work."""
        mail: asyncio.Queue[PendingCallback | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.post = lambda call: post_to(loop, mail, call)
        self.thread.start()
        try:
            while (call := await mail.get()) is not None:
                await call.make_in_loop()
        except BaseException:
            self.ask_to_stop(at_once=True)
            while (call := await mail.get()) is not None:
                call.leave()
            raise
        return self.outcome.result()

    def ask_to_stop(self, *, at_once: bool) -> None:
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.hear, at_once)

    def hear(self, at_once: bool) -> None:
        if self.has_something_to_lose and not at_once:
            self.stop.set()
        elif self.task is not None:
            self.task.cancel()


def post_to(loop: asyncio.AbstractEventLoop, mail: asyncio.Queue[Any], call: PendingCallback | None) -> None:
    with suppress(RuntimeError):  # the loop that attended is gone
        loop.call_soon_threadsafe(mail.put_nowait, call)


class LoopThread:
    """An event loop that runs in a thread until it is closed, for calls from anywhere.

    Example:
        thread = LoopThread("engine")
        thread.run(engine.generate(...))
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work, for which this thread waits; an interruption cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
