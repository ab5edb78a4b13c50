"""Work in a thread of its own, and who attends to it."""

import asyncio
import sys
import threading

import pytest

from turnwise.api.background import Background, LoopThread
from turnwise.rollout.calls import is_from_outside


def test_callbacks_run_where_the_work_was_started():
    seen = []

    async def work(background):
        seen.append(threading.current_thread())
        return [await background.call(lambda number: (number + 1, threading.current_thread()), 1)]

    [(number, thread)] = Background(work).attend()
    assert number == 2
    assert thread is threading.current_thread()
    assert seen[0] is not thread


def test_it_works_inside_a_running_loop():
    async def work(background):
        return await background.call(lambda number: number + 1, 1)

    async def main():
        return Background(work).attend()

    assert asyncio.run(main()) == 2


def test_a_running_loop_goes_on_and_may_be_called():
    async def work(background):
        async def double(number):
            await asyncio.sleep(0)
            return asyncio.get_running_loop(), number * 2

        return await background.call(double, 2)

    async def main():
        ticks = asyncio.create_task(tick())
        loop, number = await Background(work).attend_in_loop()
        ticks.cancel()
        return number, loop is asyncio.get_running_loop()

    async def tick():
        while True:
            await asyncio.sleep(0)

    assert asyncio.run(main()) == (4, True)


def interrupt(_):
    raise KeyboardInterrupt


def test_an_interruption_asks_to_stop_and_the_work_ends_by_itself():
    ended = []

    async def work(background):
        background.has_something_to_lose = True
        assert await background.call(interrupt, None) is None
        await background.stop.wait()
        ended.append("by itself")

    with pytest.raises(KeyboardInterrupt):
        Background(work).attend()
    assert ended == ["by itself"]


def test_the_second_interruption_cancels():
    ended = []

    async def work(background):
        background.has_something_to_lose = True
        try:
            for _ in range(2):
                await background.call(interrupt, None)
            await asyncio.Event().wait()
        finally:
            ended.append(background.stop.is_set())

    with pytest.raises(KeyboardInterrupt):
        Background(work).attend()
    assert ended == [True]


def test_work_without_anything_to_lose_is_cancelled_at_once():
    async def work(background):
        await background.call(interrupt, None)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        Background(work).attend()


def test_a_callback_that_ends_the_program_ends_the_work_first():
    async def work(background):
        await background.call(lambda _: sys.exit(3), None)
        await asyncio.Event().wait()

    background = Background(work)
    with pytest.raises(SystemExit):
        background.attend()
    assert not background.thread.is_alive()


def test_whoever_is_cancelled_cancels_the_work():
    begun, closed = asyncio.Event(), threading.Event()

    async def work(background):
        try:
            await background.call(lambda _: begun.set(), None)
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def main():
        waiting = asyncio.create_task(Background(work).attend_in_loop())
        await begun.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return closed.is_set()

    assert asyncio.run(main())


def test_errors_of_work_and_of_callbacks_arrive():
    async def work(background):
        with pytest.raises(ZeroDivisionError):
            await background.call(lambda number: 1 // number, 0)
        raise LookupError("of the work")

    with pytest.raises(LookupError, match="of the work"):
        Background(work).attend()


def test_a_loop_in_a_thread_serves_until_it_is_closed():
    thread = LoopThread("test")

    async def where():
        return threading.current_thread().name

    assert thread.run(where()) == "test"
    thread.close()
    thread.close()
    assert not thread.thread.is_alive()


def test_nobody_outside_interrupts_an_environment_of_a_run_in_a_thread():
    async def work(background):
        return is_from_outside(KeyboardInterrupt()), await background.call(is_from_outside, KeyboardInterrupt())

    assert Background(work).attend() == (False, True)
