"""Groups as they finish, groups that an earlier part of a run left waiting, and what is said while nothing comes."""

import asyncio
import logging
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.acting import group, run
from support.making import few, make_group
from turnwise.schedule.fairness import Fairness
from turnwise.schedule.stream import GroupStream, LagSlots, Used
from turnwise.schedule.tasks import Draw
from turnwise.types import Task


def draws(first=0):
    numbers = count(first)

    def draw():
        number = next(numbers)
        return Draw(number, Task(f"{number}", "hops"), 0)

    return draw


def group_maker(delays, made=None):
    async def make_group(draw):
        await asyncio.sleep(delays.get(draw.number, 0.0))
        if made is not None:
            made.append(draw.number)
        return group(0.0, 1.0, task=draw.task)

    return make_group


async def take(stream, number):
    return [int((await stream.next()).task.id) for _ in range(number)]


@pytest.mark.parametrize(("order", "wanted"), [("started", [0, 1, 2, 3]), ("finished", [1, 3, 2, 0])])
def test_groups_come_as_they_started_or_as_they_finish(order, wanted):
    async def work():
        delays = {0: 0.12, 2: 0.06}
        async with GroupStream(draws(), group_maker(delays), LagSlots(4), 4, order=order) as stream:
            return await take(stream, 4), stream.used

    found, used = run(work())
    assert found == wanted
    assert used == Used(4, [])


def test_what_was_used_out_of_order_is_remembered():
    async def work():
        async with GroupStream(draws(), group_maker({0: 9.0}), LagSlots(4), 4, order="finished") as stream:
            await take(stream, 2)
            return stream.used

    assert run(work()) == Used(0, [1, 2])


@few
@given(st.permutations(range(12)), st.integers(0, 12))
def test_used_knows_every_number(order, size):
    used = Used()
    for number in order[:size]:
        used.add(number)
    assert {*range(used.base), *used.ahead} == set(order[:size])
    assert used.base not in used.ahead


def test_a_resumed_stream_makes_only_what_is_missing():
    made = []

    async def work():
        kept = {3: group(0.5, task=Task("3", "hops"))}
        used = Used(2, [4])
        make_group = group_maker({}, made)
        async with GroupStream(draws(2), make_group, LagSlots(3), 3, used=used, finished=kept) as stream:
            return await take(stream, 3), stream.used

    found, used = run(work())
    assert found == [2, 3, 5]
    assert made == [2, 5]
    assert used == Used(6, [])


@pytest.mark.parametrize("order", ["started", "finished"])
def test_a_resumed_stream_passes_over_used_draws_that_follow_each_other(order):
    """Otherwise a task would be trained on twice."""
    made = []

    async def work():
        used = Used(2, [3, 4, 6, 7, 8])
        make_group = group_maker({}, made)
        async with GroupStream(draws(2), make_group, LagSlots(3), 3, order=order, used=used) as stream:
            return await take(stream, 3), stream.used

    found, used = run(work())
    assert found == made == [2, 5, 9]
    assert used == Used(10, [])


def test_waiting_groups_are_those_finished_and_not_taken():
    async def work():
        make_group = group_maker({2: 9.0})
        async with GroupStream(draws(), make_group, LagSlots(4), 4) as stream:
            await take(stream, 1)
            await asyncio.sleep(0.05)
            return sorted(stream.waiting())

    assert run(work()) == [1, 3]


def test_a_group_that_was_kept_and_not_started_again_yet_is_still_waiting():
    async def work():
        kept = {7: group(0.5, task=Task("7", "hops"))}
        async with GroupStream(draws(), group_maker({}), LagSlots(1), 1, finished=kept) as stream:
            await take(stream, 1)
            return sorted(stream.waiting())

    assert run(work()) == [7]


def test_a_stalled_run_names_what_it_waits_for(caplog):
    async def work():
        async with GroupStream(draws(), group_maker({0: 0.2}), LagSlots(2), 2, patience=0.05) as stream:
            await take(stream, 1)

    with caplog.at_level(logging.WARNING):
        run(work())
    assert "1 of 2 groups are still being made: group 0: 0" in caplog.text


def test_an_error_of_an_attempt_reaches_the_training_loop():
    async def make_group(draw):
        raise RuntimeError("a bug of ours")

    async def work():
        async with GroupStream(draws(), make_group, LagSlots(1), 1) as stream:
            await stream.next()

    with pytest.raises(RuntimeError, match="a bug of ours"):
        run(work())


def test_fairness_compares_what_is_trained_with_what_was_sampled():
    fairness = Fairness()
    short, long = make_group([1.0, 1.0], num_turns=[1, 1]), make_group([1.0, 1.0], num_turns=[3, 5])
    fairness.sampled(short)
    fairness.sampled(long)
    fairness.trained([short])
    assert fairness.metrics()["fair/turns"] == pytest.approx(1.0 / 2.5)  # one turn where 2.5 were sampled
    fairness.trained([long])
    assert fairness.metrics()["fair/turns"] == 1.0
    empty = Fairness().metrics()["fair/turns"]
    assert empty != empty
