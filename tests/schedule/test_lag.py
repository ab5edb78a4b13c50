"""A thousand drawn schedules of the real loop under the virtual clock: nothing trains on tokens older than max_lag."""

import asyncio
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from support.making import make_turn
from turnwise.assemble import objective as choices
from turnwise.assemble.run import settings_of
from turnwise.plan.pack import pack
from turnwise.recipe.parse import parse_recipe
from turnwise.rollout.concurrently import all_of
from turnwise.schedule.order import Line, Started, first_full_step, first_in_time
from turnwise.schedule.tasks import Draw, TaskOrder
from turnwise.testing import clock
from turnwise.testing.workers import in_virtual_time
from turnwise.training.loop import LoopParts, Progress, Stages, train
from turnwise.types import Group, Status, Task, Trajectory, turns_of

SCHEDULES, SHARDS = 1000, 10


class Tokens:
    """An engine in miniature: every token takes its time and has the version that is live when it comes."""

    def __init__(self, random, pace):
        self.random, self.pace = random, pace
        self.version = 0

    async def sample(self, size):
        versions = []
        for _ in range(size):
            await asyncio.sleep(self.pace * self.random.expovariate(1.0))
            versions.append(self.version)
        return np.array(versions)

    async def load(self, weights, version):
        await asyncio.sleep(self.pace * self.random.random())
        self.version = version
        await asyncio.sleep(self.pace * self.random.random())


class NoModel:
    """A learner without a model."""

    def __init__(self):
        self.seconds = {"score": 0.0}
        self.num_skipped_in_a_row = 0

    def update(self, plan, credit, weights, told, objective):
        return {"loss": 0.0}, told["old"]

    def score(self, plan, num_turns, name="old"):
        raise AssertionError("no loss here needs scores")

    def publish(self):
        return {}


def drawn_recipe(random, order=None):
    """A recipe with what a schedule depends on drawn at random, apart from an order that is given."""
    max_lag = random.choice((0, 0, 1, 1, 2, 2, 3, 5))
    order = order or (random.choice(("started", "finished")) if max_lag else "started")
    more = {}
    if order == "finished":
        more = {"stale": random.choice(("drop_group", "mask_turn"))}
    elif order == "due":
        max_lag = max(1, max_lag)
        more = {"mean_lag": max_lag * random.choice((0.25, 0.5, 0.75, 1.0))}
    return parse_recipe(
        {
            "env": {"name": "hops"},
            "steps": random.randint(4, 10),
            "max_lag": max_lag,
            "schedule": {"order": order, **more},
            "groups_per_step": random.randint(1, 4),
            "rollout": {"group_size": 2},
            "credit": {"name": "grpo"},
            "guards": {"max_dropped_groups": 100_000},
        },
        "drawn",
    )


def played(seed, order=None, more_slots=0, until=None):
    """(settings, lags of every trained token, records by step, progress, draws started) of one schedule; `until` some
    step it is stopped and resumed."""
    random = Random(seed)
    recipe = drawn_recipe(random, order)
    settings = settings_of(recipe)
    settings = replace(settings, slots=settings.slots + more_slots)
    pace, tail = 10 ** random.uniform(-2, 0), random.uniform(0.0, 2.5)
    slow, fail, dull = 10 ** random.uniform(-1, 2), random.choice((0.0, 0.2)), random.choice((0.0, 0.0, 0.5))
    engine = Tokens(random, pace)
    started = []

    async def attempt():
        turns = []
        for _ in range(random.randint(1, 4)):
            versions = await engine.sample(random.randint(1, 3))
            turns.append(replace(make_turn([1], [2] * len(versions)), versions=versions))
            await asyncio.sleep(random.lognormvariate(0.0, tail))
        status = Status.failed if random.random() < fail else Status.finished
        return Trajectory(tuple(turns), status, float(random.random() > dull) * random.random())

    async def make_group(draw):
        started.append(draw.number)
        made = await all_of(attempt() for _ in range(2))
        counted = tuple(t for t in made if t.status.counts)
        return Group(draw.task, counted, tuple(t for t in made if not t.status.counts))

    stages = Stages(
        make_group=make_group,
        keep=choices.keep_of(recipe),
        plan=lambda turns: pack(turns, 10_000),
        estimate=choices.estimate_of(recipe),
        correct=choices.correct_of(recipe),
        targets=None,
        weigh=choices.weighting_of(recipe),
        anchor=choices.ratio_of(recipe).compare,
        objective=None,
        run=in_virtual_time(lambda: slow * random.random()),
    )
    lags, trained = [], []
    progress = Progress()

    left = {}
    stop = asyncio.Event()

    async def after(progress, metrics, records, waiting):
        if progress.step == until:
            left.update(waiting)
            stop.set()
        kept = [record for record in records if record.kept]
        trained.append([record.group.task.id for record in kept])
        for record in kept:
            for turn, weights in zip(turns_of([record.group]), record.weights, strict=True):
                lags.extend((progress.step - 1 - turn.versions)[weights != 0])
        await asyncio.sleep(pace * random.random())

    def parts():
        tasks = TaskOrder({"hops": [Task(f"{n}", "hops") for n in range(7)]}, {"hops": 1.0}, seed)
        return LoopParts(settings=settings, stages=stages, learner=NoModel(), engine=engine, tasks=tasks)

    clock.run(train(parts(), progress, after, stop), seed=seed)
    if until is not None:
        until = None
        clock.run(train(parts(), progress, after, asyncio.Event(), left), seed=seed + 1)
    return settings, lags, trained, progress, started


@pytest.mark.parametrize("shard", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, SHARDS))])
def test_no_trained_token_is_older_than_the_lag_allows(shard):
    bounds_met = 0
    for seed in range(shard, SCHEDULES, SHARDS):
        settings, lags, trained, progress, started = played(seed)
        assert progress.step == settings.steps
        assert [len(kept) for kept in trained] == [settings.groups_per_step] * settings.steps
        assert max(lags) <= settings.max_lag, seed
        assert min(lags) >= 0, seed
        bounds_met += max(lags) == settings.max_lag > 0
        assert started == list(range(len(started))), seed  # every draw once, in order
        assert len(started) >= progress.draws  # used: trained on or dropped
        assert progress.used.base + len(progress.used.ahead) == progress.draws, seed
    assert bounds_met > 10  # the bound is reached, not only kept


DUE = 1000
DUE_SHARDS = 25


@pytest.mark.parametrize("shard", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, DUE_SHARDS))])
def test_groups_that_are_overtaken_are_trained_on_in_time(shard):
    """Heavy tails, failures and drops; every second run is stopped after some step and resumed."""
    bounds_met = overtaken = 0
    for seed in range(shard, DUE, DUE_SHARDS):
        until = 2 if seed % 2 else None
        settings, lags, trained, progress, started = played(seed, "due", until=until)
        assert progress.step == settings.steps
        assert [len(kept) for kept in trained] == [settings.groups_per_step] * settings.steps
        assert min(lags) >= 0, seed
        assert max(lags) <= settings.max_lag, seed
        bounds_met += max(lags) == settings.max_lag
        overtaken += min(lags) < settings.max_lag
        assert progress.used.base + len(progress.used.ahead) == progress.draws, seed
        assert until or started == list(range(len(started))), seed  # every draw once, in order
    assert bounds_met > 10
    assert overtaken > 10


@pytest.mark.parametrize("order", ["started", "due"])
def test_with_one_slot_too_many_the_bound_breaks(order):
    broken = 0
    for seed in range(20):
        settings, lags, *_ = played(seed, order, more_slots=1)
        full = settings.slots > (settings.max_lag + 1) * settings.groups_per_step
        assert full or max(lags) <= settings.max_lag, seed
        broken += max(lags) > settings.max_lag
    assert broken >= 2


def test_a_group_that_waits_is_not_made_late_by_those_that_overtake_it():
    """Three places are left in step 7, and two groups are due by then: one other may be taken, and no more."""
    entries = [entry(5), entry(5), entry(6), entry(6), entry(7), entry(7)]
    line = Line(entries, entries[2:], step=7, left=3, groups_per_step=3, max_lag=2)
    assert first_full_step(line) is None
    assert first_in_time(line) is entries[2]
    rest = [*entries[:2], *entries[3:]]
    line = Line(rest, rest[2:], step=7, left=2, groups_per_step=3, max_lag=2)
    assert first_full_step(line) == 7
    assert first_in_time(line) is None
    assert first_in_time(replace(line, ready=[*rest[2:], rest[1]])) is rest[1]


def entry(version):
    return Started(Draw(0, Task("0", "hops"), 0), None, version)
