"""The clock of a run's event loop, and who is timed out when something holds the loop up."""

import asyncio
import threading
import time

import pytest

from support.acting import Puppet, attempted
from turnwise.envs.base import Reply
from turnwise.schedule.run_loop import COUNTED, RunLoop, stall_metrics
from turnwise.types import Status

HELD = 1.0


def run(work):
    with asyncio.Runner(loop_factory=RunLoop) as runner:
        return runner.run(work)


def test_the_clock_stands_still_while_the_loop_is_held_up():
    async def work():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        before = loop.time()
        time.sleep(HELD)
        within = loop.time()
        await asyncio.sleep(0)
        return before, within, loop.time()

    before, within, after = run(work())
    assert before <= within <= after
    assert after - before < HELD / 2


def test_the_clock_runs_while_the_loop_waits():
    async def work():
        loop = asyncio.get_running_loop()
        before, began = loop.time(), time.monotonic()
        await asyncio.sleep(0.3)
        return loop.time() - before, time.monotonic() - began

    own, real = run(work())
    assert 0.3 <= own <= real + COUNTED


def test_an_answer_in_time_is_in_time_though_nobody_looked():
    """A thread answers after 50 ms, the loop is held up for a second, and the limit is half a second."""

    async def work():
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        threading.Timer(0.05, loop.call_soon_threadsafe, (answer.set_result, "here")).start()
        loop.call_soon(time.sleep, HELD)
        async with asyncio.timeout(HELD / 2):
            return await answer

    assert run(work()) == "here"


def test_what_takes_too_long_times_out():
    async def work():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.sleep(60)

    run(work())


class Slow(Puppet):
    """Answers after three tenths of a second, in three parts."""

    async def step(self, message):
        for _ in range(3):
            await asyncio.sleep(0.1)
        return Reply(finished=True, outcome=1.0)


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15])
def test_a_stall_longer_than_a_call_may_take_times_out_no_attempt(delay):
    async def work():
        asyncio.get_running_loop().call_later(delay, time.sleep, HELD)
        return await asyncio.gather(*(attempted(Slow(), call_seconds=0.6, attempt_seconds=0.8) for _ in range(8)))

    assert [made.status for made in run(work())] == [Status.finished] * 8


def test_the_longest_stall_is_told_once():
    async def work():
        time.sleep(0.3)
        await asyncio.sleep(0)
        return stall_metrics(), stall_metrics()

    first, second = run(work())
    assert first["seconds/longest_stall"] >= 0.3
    assert second["seconds/longest_stall"] == 0.0


def test_another_loop_tells_nothing():
    async def work():
        return stall_metrics()

    assert asyncio.run(work()) == {}
