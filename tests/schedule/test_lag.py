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
from turnwise.schedule.tasks import TaskOrder
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


def drawn_recipe(random):
    """A recipe with what a schedule depends on drawn at random."""
    max_lag = random.choice((0, 0, 1, 1, 2, 2, 3, 5))
    order = random.choice(("started", "finished")) if max_lag else "started"
    stale = {"stale": random.choice(("drop_group", "mask_turn"))} if order == "finished" else {}
    return parse_recipe(
        {
            "env": {"name": "hops"},
            "steps": random.randint(4, 10),
            "max_lag": max_lag,
            "schedule": {"order": order, **stale},
            "groups_per_step": random.randint(1, 4),
            "rollout": {"group_size": 2},
            "credit": {"name": "grpo"},
            "guards": {"max_dropped_groups": 100_000},
        },
        "drawn",
    )


def played(seed):
    """(settings, lags of every trained token, records by step, draws used, draws started) of one schedule."""
    random = Random(seed)
    recipe = drawn_recipe(random)
    settings = settings_of(recipe)
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

    async def after(progress, metrics, records, waiting):
        kept = [record for record in records if record.kept]
        trained.append([record.group.task.id for record in kept])
        for record in kept:
            for turn, weights in zip(turns_of([record.group]), record.weights, strict=True):
                lags.extend((progress.step - 1 - turn.versions)[weights != 0])
        await asyncio.sleep(pace * random.random())

    tasks = TaskOrder({"hops": [Task(f"{n}", "hops") for n in range(7)]}, {"hops": 1.0}, seed)
    parts = LoopParts(settings=settings, stages=stages, learner=NoModel(), engine=engine, tasks=tasks)
    work = train(parts, progress, after, asyncio.Event())
    clock.run(work, seed=seed)
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
