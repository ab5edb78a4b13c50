import asyncio
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.acting import Puppet, group, hang, limits, renderer, run, says
from turnwise.engines.base import Sampling
from turnwise.rollout.group import AttemptMaker
from turnwise.schedule.stream import GroupStream, LagSlots
from turnwise.schedule.take import take
from turnwise.schedule.tasks import Draw
from turnwise.types import Task


def draws():
    """Draws of tasks that are called 0, 1, 2, ..."""
    numbers = count()

    def draw():
        number = next(numbers)
        return Draw(number, Task(f"{number}", "hops"), 0)

    return draw


async def ticks(number):
    """Time as the loop's rounds: many schedules in no time at all."""
    for _ in range(number):
        await asyncio.sleep(0)


async def settled():
    await ticks(20)


def number_of(made):
    return int(made.task.id)


class Training:
    """A training loop in miniature: versions, lags and what was started, with durations of one's choice."""

    def __init__(self, max_lag, groups, steps, *, sample_ticks, train_ticks, keep=lambda number: True):
        self.slots = LagSlots((max_lag + 1) * groups)
        self.groups, self.steps = groups, steps
        self.sample_ticks, self.train_ticks, self.keep = sample_ticks, train_ticks, keep
        self.version = 0
        self.started_at = {}
        self.running = self.most_running = 0
        self.lags = []
        self.trained, self.dropped = [], []

    async def make_group(self, draw):
        self.started_at[draw.number] = self.version
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await ticks(self.sample_ticks(draw.number))
        self.running -= 1
        return group(0.0, 1.0, task=draw.task)

    async def train(self):
        async with GroupStream(draws(), self.make_group, self.slots, self.steps * self.groups) as stream:
            for _ in range(self.steps):
                taken = await take(stream, self.groups, lambda made: self.keep(number_of(made)), 10**9)
                numbers = [number_of(made) for made in taken.kept]
                self.lags += [self.version - self.started_at[number] for number in numbers]
                self.trained += numbers
                self.dropped += [number_of(made) for made in taken.dropped]
                await ticks(self.train_ticks())
                self.version += 1
                self.slots.release(len(taken.kept))
            await settled()


@settings(max_examples=120, deadline=None)
@given(
    max_lag=st.integers(0, 4),
    groups=st.integers(1, 4),
    slowest=st.integers(0, 30),
    slowest_step=st.integers(0, 30),
    drop=st.sampled_from([0.0, 0.0, 0.3, 0.7]),
    seed=st.integers(0, 10**6),
)
def test_no_group_is_trained_on_later_than_the_lag_allows(max_lag, groups, slowest, slowest_step, drop, seed):
    random = Random(seed)
    kept = {}
    training = Training(
        max_lag,
        groups,
        steps=8,
        sample_ticks=lambda number: random.choice((0, 1, random.randint(0, slowest), slowest)),
        train_ticks=lambda: random.randint(0, slowest_step),
        keep=lambda number: kept.setdefault(number, random.random() >= drop),
    )
    run(training.train())
    assert len(training.trained) == 8 * groups
    assert max(training.lags) <= max_lag
    assert training.trained == sorted(training.trained)  # in the order they started
    assert not set(training.trained) & set(training.dropped)
    assert len(training.started_at) == len(training.trained) + len(training.dropped)  # none is started in vain
    assert training.most_running <= (max_lag + 1) * groups


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_sampling_runs_ahead_as_far_as_the_lag_allows(max_lag):
    """The bound is met, not only kept: quick attempts wait for a slow learner."""
    training = Training(max_lag, 3, steps=10, sample_ticks=lambda number: 1, train_ticks=lambda: 25)
    run(training.train())
    assert max(training.lags) == max_lag
    assert training.lags[-1] == max_lag


def test_without_lag_every_group_is_sampled_by_the_weights_it_trains():
    random = Random(0)
    training = Training(
        0, 4, steps=6, sample_ticks=lambda number: random.randint(0, 9), train_ticks=lambda: random.randint(0, 9)
    )
    run(training.train())
    assert set(training.lags) == {0}
    assert training.trained == list(range(24))
    assert [training.started_at[number] for number in range(24)] == [number // 4 for number in range(24)]


def test_a_slow_group_is_waited_for_and_keeps_its_place():
    training = Training(2, 2, steps=6, sample_ticks=lambda number: 300 if number == 3 else 1, train_ticks=lambda: 2)
    run(training.train())
    assert training.trained == list(range(12))
    assert max(training.lags) <= 2


def test_dropped_groups_are_replaced_at_once():
    training = Training(
        0, 2, steps=3, sample_ticks=lambda number: 1, train_ticks=lambda: 3, keep=lambda number: number % 5 == 0
    )
    run(training.train())
    assert training.trained == [0, 5, 10, 15, 20, 25]
    assert len(training.dropped) == 20
    assert max(training.lags) == 0


def test_groups_start_only_while_there_are_slots():
    started = []

    async def make_group(draw):
        started.append(draw.number)
        return group(1.0, task=draw.task)

    async def scene():
        slots = LagSlots(3)
        async with GroupStream(draws(), make_group, slots, wanted=100) as stream:
            await settled()
            assert started == [0, 1, 2]
            assert [number_of(await stream.next()) for _ in range(2)] == [0, 1]
            await settled()
            assert started == [0, 1, 2]  # taking frees nothing: their weights are not live
            slots.release(2)
            await settled()
            assert started == [0, 1, 2, 3, 4]
            stream.replace_dropped()
            await settled()
            assert started == [0, 1, 2, 3, 4, 5]

    run(scene())


def test_no_more_groups_than_wanted_are_started():
    started = []

    async def make_group(draw):
        started.append(draw.number)
        return group(1.0, task=draw.task)

    async def scene():
        async with GroupStream(draws(), make_group, LagSlots(100), wanted=4) as stream:
            await settled()
            assert len(started) == 4
            stream.replace_dropped()
            await settled()
            assert len(started) == 5

    run(scene())


def test_a_taker_that_gives_up_loses_no_group():
    async def make_group(draw):
        await ticks(5)
        return group(1.0, task=draw.task)

    async def scene():
        async with GroupStream(draws(), make_group, LagSlots(4), wanted=4) as stream:
            impatient = asyncio.create_task(stream.next())
            await ticks(3)
            impatient.cancel()
            await asyncio.gather(impatient, return_exceptions=True)
            return [number_of(await stream.next()) for _ in range(4)]

    assert run(scene()) == [0, 1, 2, 3]


def test_an_error_in_an_attempt_reaches_the_taker():
    async def make_group(draw):
        raise LookupError("a mistake of ours")

    async def scene():
        async with GroupStream(draws(), make_group, LagSlots(2), wanted=4) as stream:
            await stream.next()

    with pytest.raises(LookupError, match="a mistake of ours"):
        run(scene())


def test_an_error_in_drawing_reaches_the_taker():
    def draw():
        raise LookupError("no weights for this dataset")

    async def scene():
        async with GroupStream(draw, None, LagSlots(2), wanted=4) as stream:
            await stream.next()

    with pytest.raises(LookupError):
        run(scene(), seconds=0.3)


@pytest.mark.parametrize("how", ["leave", "raise", "cancel"])
def test_leaving_the_stream_cancels_attempts_and_closes_environments(how):
    made = []

    def make():
        made.append(Puppet(hang))
        return made[-1]

    patient = limits(call_seconds=1000.0, attempt_seconds=1000.0)
    attempt_maker = AttemptMaker(
        {"hops": make}, says(), renderer(), Sampling(99), patient, seed=0, split="train", attempts=2
    )

    async def scene():
        make_group = lambda draw: attempt_maker.group(draw.task, draw.epoch)
        async with GroupStream(draws(), make_group, LagSlots(3), wanted=100) as stream:
            while sum(len(puppet.heard) for puppet in made) < 6:
                await asyncio.sleep(0.001)
            if how == "raise":
                raise LookupError
            if how == "cancel":
                await stream.next()

    async def outside():
        call = asyncio.create_task(scene())
        if how == "cancel":
            while sum(len(puppet.heard) for puppet in made) < 6:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled() == (how == "cancel")
        return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    left = run(outside(), seconds=5)
    assert not [name for name in left if name.startswith("group")]
    assert len(made) == 6
    assert [puppet.closed for puppet in made] == [1] * 6


def test_leaving_a_stream_that_never_started_anything():
    async def scene():
        async with GroupStream(draws(), None, LagSlots(0), wanted=3) as stream:
            assert isinstance(stream, GroupStream)

    run(scene())
