import asyncio

import pytest

from support.acting import run
from turnwise.rollout.deadline import Deadline, is_deadline
from turnwise.rollout.limits import Limits


class Clock:
    """The time of a loop whose timers are rung by hand. It begins at 0, before all timers of the loop itself."""

    def __init__(self, monkeypatch):
        self.loop = asyncio.get_running_loop()
        self.time, self.timers, self.num_set = 0.0, [], 0
        monkeypatch.setattr(self.loop, "time", lambda: self.time)
        monkeypatch.setattr(self.loop, "call_at", self.call_at)

    def call_at(self, when, callback, *arguments, context=None):
        self.num_set += 1
        timer = asyncio.TimerHandle(when, callback, arguments, self.loop)
        self.timers.append(timer)
        return timer

    def advance(self, seconds):
        """Ring all timers of the next seconds, in order."""
        end = self.time + seconds
        while due := [timer for timer in self.timers if not timer.cancelled() and timer.when() <= end]:
            first = min(due, key=asyncio.TimerHandle.when)
            self.timers.remove(first)
            self.time = max(self.time, first.when())
            first._run()
        self.time = end


LIMITS = Limits(8, 100, 10, 110, call_seconds=10.0, attempt_seconds=100.0, grace=5.0)


def test_calls_that_end_in_time_set_no_timers(monkeypatch):
    async def scene():
        clock = Clock(monkeypatch)
        deadline = Deadline(LIMITS)
        async with deadline:
            for _ in range(1000):
                deadline.start_call()
                clock.time += 0.01
        deadline.cancel_timer()
        return clock.num_set

    assert run(scene()) <= 4


@pytest.mark.parametrize("calls_before", [0, 3])
def test_a_call_ends_at_its_own_deadline(monkeypatch, calls_before):
    async def scene():
        clock = Clock(monkeypatch)
        deadline = Deadline(LIMITS)
        with pytest.raises(TimeoutError) as late:
            async with deadline:
                for _ in range(calls_before):
                    deadline.start_call()
                    clock.advance(9.0)
                    await asyncio.sleep(0)
                deadline.start_call()
                clock.advance(9.9)
                for _ in range(3):
                    await asyncio.sleep(0)
                clock.advance(0.2)
                for _ in range(5):
                    await asyncio.sleep(0)
                raise AssertionError("it went on")
        assert is_deadline(late.value)
        assert not deadline.overdue.done()
        clock.advance(5.0)
        assert deadline.overdue.done()

    run(scene())


def test_the_whole_attempt_ends_though_no_call_is_late(monkeypatch):
    async def scene():
        clock = Clock(monkeypatch)
        deadline = Deadline(LIMITS)
        began = clock.time
        with pytest.raises(TimeoutError):
            async with deadline:
                while True:
                    deadline.start_call()
                    clock.advance(7.0)
                    for _ in range(3):
                        await asyncio.sleep(0)
        assert 100.0 <= clock.time - began <= 107.0

    run(scene())


def test_a_deadline_that_is_suspended_does_not_pass(monkeypatch):
    async def scene():
        clock = Clock(monkeypatch)
        deadline = Deadline(LIMITS)
        async with deadline:
            deadline.start_call()
            deadline.suspend()
            clock.advance(500.0)
            for _ in range(3):
                await asyncio.sleep(0)
            deadline.resume()
            assert deadline.when == clock.time + 10.0
        deadline.cancel_timer()
        assert not deadline.overdue.done()

    run(scene())


def test_code_that_goes_on_after_its_deadline_gets_no_other(monkeypatch):
    async def scene():
        clock = Clock(monkeypatch)
        deadline = Deadline(LIMITS)
        with pytest.raises(RuntimeError):
            async with deadline:
                deadline.start_call()
                clock.advance(11.0)
                try:
                    for _ in range(5):
                        await asyncio.sleep(0)
                except asyncio.CancelledError:
                    pass
                deadline.start_call()

    run(scene())
