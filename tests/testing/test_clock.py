import asyncio

import pytest

from turnwise.testing.clock import Deadlock, run


async def now():
    return asyncio.get_running_loop().time()


def test_hours_take_no_time():
    async def sleep():
        await asyncio.sleep(1000 * 3600)
        return await now()

    assert run(sleep()) == pytest.approx(1000 * 3600)


def test_sleepers_wake_in_order_and_on_time():
    woken = []

    async def sleep(seconds):
        await asyncio.sleep(seconds)
        woken.append((seconds, await now()))

    async def all_of_them():
        await asyncio.gather(*(sleep(seconds) for seconds in (5, 1, 3, 0.25)))

    run(all_of_them())
    assert [seconds for seconds, _ in woken] == [0.25, 1, 3, 5]
    assert all(at == pytest.approx(seconds) for seconds, at in woken)


def test_deadlines_hold():
    async def late():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.sleep(8)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(100), 13)
        assert await asyncio.wait_for(asyncio.sleep(2, "in time"), 3) == "in time"
        return await now()

    assert run(late()) == pytest.approx(22)


def test_what_can_never_end_is_named():
    async def wait_for_nobody():
        await asyncio.gather(asyncio.create_task(asyncio.Event().wait(), name="a lonely task"), asyncio.sleep(9))

    with pytest.raises(Deadlock, match="a lonely task"):
        run(wait_for_nobody())


def test_two_who_wait_for_each_other_are_found():
    async def meet():
        one, other = asyncio.Lock(), asyncio.Lock()

        async def take(first, second):
            async with first:
                await asyncio.sleep(1)
                async with second:
                    pass

        await asyncio.gather(take(one, other), take(other, one))

    with pytest.raises(Deadlock):
        run(meet())


async def order_of_equals():
    order = []

    async def sleep(number):
        await asyncio.sleep(1)
        order.append(number)

    await asyncio.gather(*(sleep(number) for number in range(12)))
    return order


def test_a_seed_is_a_schedule():
    assert run(order_of_equals()) == run(order_of_equals())
    orders = [run(order_of_equals(), seed) for seed in range(8)]
    assert orders == [run(order_of_equals(), seed) for seed in range(8)]
    assert len({tuple(order) for order in orders}) == 8


def test_a_seed_does_not_change_when_things_happen():
    async def sleep():
        for _ in range(10):
            await asyncio.sleep(6)
        return await now()

    assert run(sleep(), seed=3) == pytest.approx(60, abs=1e-4)


def test_errors_come_through():
    async def fail():
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(fail())
