"""The watchdog: a thread that receives signals while the event loop is blocked, and interrupts environment code that
blocks the loop."""

from __future__ import annotations

import asyncio
import logging
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar

from turnwise.rollout.blame import Blamed, blamed, stack_of
from turnwise.rollout.deadline import Blocked
from turnwise.rollout.leaving import end_all
from turnwise.schedule.ending import briefly, end_at_once
from turnwise.schedule.run_loop import RunLoop

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], None]

TICK = 0.25
"""Seconds between two looks."""
HURRY = 3.0
"""Seconds that an environment may block the loop after somebody has asked the run to stop."""
GRACE = 5.0
"""Seconds that the loop may take to stop, before the process ends without it."""
STRIKES = 3
"""How often environment code is interrupted before the watchdog gives up on it."""
STRIKE = signal.SIGUSR2
STOPS = (signal.SIGINT, signal.SIGTERM)
STOPPED = 130
BLOCKED = 1


@dataclass(slots=True)
class Hold:
    """A call into environment code that has blocked the loop since it was first seen."""

    blamed: Blamed
    since: float
    strikes: int = 0


class Watchdog:
    """Runs work in an event loop that it watches. It must run in the main thread, whose signal handlers it replaces.

    The first SIGINT or SIGTERM asks the work to stop (it sets `stop`), if the work has something to lose; the second
    cancels the work, and ends the process if that takes more than a few seconds.

    Environment code that has blocked the loop for `blocked_seconds` is interrupted: a signal raises an exception in it,
    which also ends a sleep or a read. If code cannot be interrupted, the process ends. Our own code may block the loop
    for as long as it likes.

    Example:
        watchdog = Watchdog(say=print, blocked_seconds=60.0, farewell="go on with ...")
        summary = watchdog.run(lambda stop: train(stop))
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None],
        blocked_seconds: float,
        farewell: str,
        keeps: Collection[CodeType] = (),
        loop_factory: Callable[[], RunLoop] = RunLoop,
    ) -> None:
        self.say = say
        self.loop_factory = loop_factory
        self.blocked_seconds = blocked_seconds
        self.farewell = farewell
        """Printed if the process ends at once."""
        self.keeps = frozenset(keeps)
        """Coroutine functions that stop by themselves when asked to, because they have something to lose. While none of
        them is running, the first signal acts like the second."""
        self.signals = 0
        self.end_at = float("inf")
        self.turned = True
        self.hold: Hold | None = None
        self.hurry = HURRY
        self.struck: FrameType | None = None
        self.over = threading.Event()
        self.work: asyncio.Task[Any] | None = None

    # ------------------------------------------------------------ the main thread

    def run(self, work: Callable[[asyncio.Event], Coroutine[Any, Any, Result]]) -> Result:
        """The result of the work; CancelledError if a second signal ended it."""
        self.thread = threading.get_ident()
        self.ears, mouth = socket.socketpair()
        mouth.setblocking(False)
        handlers: dict[signal.Signals, Handler] = {STRIKE: self.strike, **dict.fromkeys(STOPS, Hearing())}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        heard_before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        watching = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        try:
            with asyncio.Runner(loop_factory=self.loop_factory) as runner:
                self.loop = runner.get_loop()
                self.stop = asyncio.Event()
                watching.start()
                return runner.run(self.attended(work))
        finally:
            self.over.set()
            signal.set_wakeup_fd(heard_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            mouth.close()
            watching.join()
            self.ears.close()

    async def attended(self, work: Callable[[asyncio.Event], Coroutine[Any, Any, Result]]) -> Result:
        self.work = working = asyncio.create_task(work(self.stop), name="work")
        try:
            return await working
        finally:
            await end_all(GRACE)

    def strike(self, number: int, frame: FrameType | None) -> None:
        """Raise an error in the chosen environment code, if it is still running."""
        struck, self.struck = self.struck, None
        while struck is not None and frame is not None:
            if frame is struck:
                raise Blocked(
                    "its environment held up the event loop without an await; make that method a plain function, which "
                    "runs in a thread, or raise rollout.limits.blocked_seconds"
                )
            frame = frame.f_back

    # ------------------------------------------------------------ the thread

    def watch(self) -> None:
        while not self.over.is_set():
            ready, _, _ = select.select([self.ears], [], [], TICK)
            for number in self.ears.recv(64) if ready else b"":
                if number in STOPS:
                    self.hear()
            self.look(time.monotonic())

    def hear(self) -> None:
        """Somebody wants the work to stop."""
        self.signals += 1
        if self.signals == 1 and self.has_something_to_lose(stack_of(self.thread)):
            briefly(lambda: self.say("stopping after this step, with a checkpoint; once more to stop at once"))
            self.tell(self.stop.set)
        elif self.signals <= 2:
            self.tell(self.cancel)
            self.end_at = min(self.end_at, time.monotonic() + GRACE)
        else:
            self.end(STOPPED)

    def look(self, now: float) -> None:
        if now >= self.end_at:
            self.end(STOPPED)
        if self.turned:
            self.turned, self.hold = False, None
            self.tell(self.turn)
            return
        culprit = blamed(stack_of(self.thread))
        if culprit is None:
            self.hold = None
        elif self.hold is None or self.hold.blamed.frame is not culprit.frame:
            self.hold = Hold(culprit, now)
        else:
            self.interrupt(self.hold, culprit, now)

    def interrupt(self, hold: Hold, culprit: Blamed, now: float) -> None:
        """Interrupt environment code that has blocked the loop for too long."""
        patience = min(self.blocked_seconds, self.hurry) if self.signals else self.blocked_seconds
        if now - hold.since < patience + hold.strikes * HURRY:
            return
        if hold.strikes == STRIKES:
            reason = f"{culprit} holds up the event loop and cannot be interrupted"
            self.end(BLOCKED, f"turnwise: the run stopped: {reason}; {self.farewell}")
        hold.strikes += 1
        if hold.strikes == 1:
            briefly(lambda: log.warning("%s: holds up the event loop; it is interrupted", culprit))
        if self.signals:
            self.hurry = TICK  # more attempts may block the loop in the same way, and nobody waits for them
        self.struck = hold.blamed.frame
        signal.pthread_kill(self.thread, STRIKE)

    def has_something_to_lose(self, stack: Sequence[FrameType]) -> bool:
        """Whether the work is inside one of the functions in `keeps`: on the stack of the main thread while it runs,
        otherwise in the chain of coroutines that it awaits."""
        waiting: Any = self.work.get_coro() if self.work is not None else None
        codes: set[Any] = {frame.f_code for frame in stack}
        while waiting is not None:
            codes.add(getattr(waiting, "cr_code", None))
            waiting = getattr(waiting, "cr_await", None)
        return not self.keeps.isdisjoint(codes)

    def end(self, code: int, words: str = "") -> None:
        end_at_once(code, lambda: self.say(words or f"stopped at once; {self.farewell}"))

    def tell(self, act: Callable[[], object]) -> None:
        """Schedule a call in the loop."""
        try:
            self.loop.call_soon_threadsafe(act)
        except RuntimeError:  # it has ended
            self.over.set()

    # ------------------------------------------------------------ in the loop

    def turn(self) -> None:
        self.turned = True

    def cancel(self) -> None:
        if self.work is not None:
            self.work.cancel()


class Hearing:
    """A signal handler that does nothing: the watchdog reads the signal numbers from a socket."""

    asks = True
    """Ctrl-C only asks the run to stop, so a KeyboardInterrupt comes from environment code."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        return None
