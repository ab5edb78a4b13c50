"""The deadlines of one attempt: for each call, for the attempt as a whole, and for giving up on one that hangs."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from turnwise.rollout.limits import Limits


class Blocked(BaseException):
    """Raised inside environment code that has blocked the event loop for too long. It is no Exception, because
    environments catch those."""


def is_deadline(error: BaseException) -> bool:
    """Whether a deadline of ours ended a call, rather than an error of the environment."""
    late = issubclass(type(error), TimeoutError) and issubclass(type(error.__cause__), asyncio.CancelledError)
    return late or issubclass(type(error), Blocked)


class Deadline:
    """When an attempt has to end. It moves closer while one of the attempt's calls runs.

    Code that does not end at its deadline gets `limits.grace` more seconds; then `overdue` is done, and the attempt is
    left behind.

    Every call moves the deadline, and almost none reaches it. So one timer serves both ends, and it is set again only
    when it rings or when it would ring too late.

    Example:
        deadline = Deadline(limits)
        async with deadline:                # raises TimeoutError when it passes
            deadline.start_call()
            reply = await environment.step(message)
            deadline.end_call()
    """

    def __init__(self, limits: Limits) -> None:
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.grace = limits.grace
        self.call_seconds = limits.call_seconds
        self.attempt_seconds = limits.attempt_seconds
        self.end = self.now() + limits.attempt_seconds
        self.when = self.end
        """The deadline at present."""
        self.give_up_at = math.inf
        self.timeout = asyncio.timeout(None)
        self.can_pass = False
        """Whether a deadline that passes ends code, and has not done so yet."""
        self.has_passed = False
        self.overdue: asyncio.Future[None] = self.loop.create_future()
        """Done when the grace after a deadline has passed and the code that should have ended still runs."""
        self.timer: asyncio.TimerHandle | None = None
        self.rings_at = math.inf
        self.is_closing = False
        self.give_up_after(self.end)

    async def __aenter__(self) -> Deadline:
        await self.timeout.__aenter__()
        self.can_pass = True
        self.ring_by(self.when)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.can_pass = False
        await self.timeout.__aexit__(*error)

    def start(self) -> None:
        """The attempt starts now: all of its time is left."""
        self.end = self.now() + self.attempt_seconds
        self.end_call()

    def pause(self) -> None:
        """No deadline until `start`: the attempt waits until it may begin."""
        self.move_to(None)

    def suspend(self) -> None:
        """No deadline until `resume`: the attempt waits for another one, which has a deadline itself."""
        self.suspended_at = self.now()
        self.move_to(None)

    def resume(self) -> None:
        """The wait is over, and does not count as time of the attempt."""
        self.end += self.now() - self.suspended_at
        self.start_call()

    def start_call(self) -> None:
        """From now on the deadline is that of one call."""
        self.move_to(min(self.end, self.now() + self.call_seconds))

    def end_call(self) -> None:
        """From now on the deadline is that of the whole attempt."""
        self.move_to(self.end)

    def start_closing(self) -> None:
        """The environment is being closed, which may take as long as one call."""
        self.is_closing = True
        self.give_up_after(self.now() + self.call_seconds)

    def hurry(self) -> None:
        """The attempt was cancelled: it gets only the grace to begin closing its environment."""
        if not self.is_closing:
            self.give_up_after(self.now())

    def move_to(self, when: float | None) -> None:
        if self.overdue.done():  # the attempt was left behind: nobody waits for it any more
            raise asyncio.CancelledError
        if self.has_passed:
            self.timeout.reschedule(None)  # raises where code goes on that its deadline has ended
            self.can_pass, self.has_passed = True, False
        self.when = math.inf if when is None else when
        self.ring_by(self.when)
        self.give_up_after(when)

    def give_up_after(self, when: float | None) -> None:
        """Leave the attempt behind if it has not ended by then and a little later; None: wait for ever."""
        self.give_up_at = math.inf if when is None else when + self.grace
        self.ring_by(self.give_up_at)

    def ring_by(self, when: float) -> None:
        """Have the timer ring then, unless it rings before."""
        if when < self.rings_at:
            self.cancel_timer()
            self.timer, self.rings_at = self.loop.call_at(when, self.ring), when

    def ring(self) -> None:
        """End what is late, and set the timer again for what is not."""
        self.timer, self.rings_at = None, math.inf
        now = self.now()
        if self.can_pass and self.when <= now:
            self.can_pass, self.has_passed = False, True
            self.timeout.reschedule(now)
        if self.give_up_at <= now:
            self.give_up()
        else:
            self.ring_by(min(self.when, self.give_up_at) if self.can_pass else self.give_up_at)

    def give_up(self) -> None:
        if not self.overdue.done():
            self.overdue.set_result(None)

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer, self.rings_at = None, math.inf
