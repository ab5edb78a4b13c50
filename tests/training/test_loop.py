"""The training loop on groups made by hand: what happens at the edges of a step."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from field_bugs.one_step import parts_of, step_on
from support.making import make_group, make_turn
from turnwise.training.loop import Progress, gap, is_stale, train
from turnwise.types import Group, Status, Task, Trajectory


def speechless(name="quiet", num_attempts=2):
    """A group in which nothing was sampled."""
    attempt = Trajectory((make_turn([1, 2], []),), Status.finished)
    return Group(Task(name, "test"), (attempt,) * num_attempts)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_mini_batch_without_a_sampled_token_drops_no_metric(order, epochs):
    groups = [speechless(), make_group([0.0, 1.0])]
    alone = step_on(groups[1:], f"epochs={epochs}")
    step = step_on([groups[place] for place in order], "groups_per_update=1", f"epochs={epochs}")
    assert {"ratio", "entropy", "clipped", "gap/mean"} <= alone.metrics.keys() <= step.metrics.keys()
    assert step.metrics["idle"] == 0.5
    for name in ("ratio", "entropy", "clipped", "gap/mean", "gap/max"):
        assert step.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-6)


def test_the_gap_is_measured_before_anything_was_updated():
    """With the second mini-batch, where the first has no token; never after an update that moved the policy."""
    groups = [make_group([0.0, 1.0], name="a"), make_group([1.0, 0.0], name="b")]
    first = step_on(groups[:1]).metrics["gap/mean"]
    assert step_on(groups, "groups_per_update=1", "optimizer.learning_rate=0.1").metrics["gap/mean"] == first


def test_the_gap_of_turns_with_routes_of_older_weights_is_told_apart():
    """The second turn is new, and its history has the routes that the weights before took."""
    routes = np.zeros((4, 1, 2), np.uint8)
    old = make_turn([1, 2, 3], [4, 5], logprobs=[-1.0, -1.0], version=6, routes=routes)
    mixed = make_turn([1, 2, 3, 4, 5, 6], [7], logprobs=[-1.0], version=7, routes=routes[:2])
    fresh = make_turn([8, 9, 9], [4, 5], logprobs=[-1.0, -1.0], version=7, routes=routes)
    rescored = [np.full(2, -9.0), np.array([-1.5]), np.array([-1.25, -0.75])]
    found = gap([old, mixed, fresh], rescored, 7)
    assert found["gap/mean"] == found["gap/max"] == 0.25
    assert found["gap/rerouted"] == 0.5
    assert gap([fresh], rescored[2:], 7) == {**found, "gap/rerouted": 0.0}
    assert gap([old, mixed], rescored[:2], 7) == {"gap/rerouted": 0.5}


def test_steps_without_any_sampled_token_are_steps():
    parts = parts_of(2, "steps=2")
    lines = []

    async def make_group(draw):
        return speechless(draw.task.id)

    async def after(progress, metrics, records, waiting):
        lines.append(metrics)

    async def scene():
        progress, stages = Progress(), replace(parts.stages, make_group=make_group)
        before = {name: tensor.clone() for name, tensor in parts.learner.publish().items()}
        await train(replace(parts, stages=stages), progress, after, asyncio.Event())
        assert all((tensor == before[name]).all() for name, tensor in parts.learner.publish().items())
        return progress

    progress = asyncio.run(scene())
    assert (progress.step, progress.updates, progress.lag_max) == (2, 2, 0)
    assert [line["idle"] for line in lines] == [1.0, 1.0]
    assert all(math.isnan(line["lag/max"]) for line in lines)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_tokens_exactly_max_lag_old_are_trained_and_older_ones_are_stale(max_lag):
    parts = parts_of(2)
    settings = replace(parts.settings, order="finished", max_lag=max_lag)
    version = 7
    turns = [make_turn([1, 2], [3, 4], version=version - lag) for lag in range(max_lag + 3)]
    assert is_stale(turns, version, settings).tolist() == [False] * (max_lag + 1) + [True, True]
    one_old_token = replace(turns[0], versions=np.array([version, version - max_lag - 1], np.int32))
    assert is_stale([one_old_token, make_turn([1], [])], version, settings).tolist() == [True, False]
    assert not is_stale(turns, version, replace(settings, order="started")).any()


@pytest.mark.parametrize("weighting", ["token_mean", "trajectory_mean", "group_mean", "turn_mean", "constant"])
def test_metrics_of_tokens_are_means_under_any_weighting(weighting):
    """Every token of these has the same logprob, so whatever the weights the mean ratio is that of each."""
    group = make_group([0.0, 1.0], num_turns=[1, 3])
    scored = {}

    def anchored(groups, old, now):
        """Every ratio is a half."""
        scored["old"] = [values + np.float32(math.log(2.0)) for values in now()]
        return scored["old"]

    metrics = step_on([group], f"weighting.name={weighting}", anchor=anchored).metrics
    assert metrics["ratio"] == pytest.approx(0.5, rel=1e-5)
    assert 0.5 * math.log(64) < metrics["entropy"] <= math.log(64) * 1.001


class Sleeper:
    """An engine that notes what happens, and when."""

    sleeps = True

    def __init__(self, engine, noted):
        self.engine, self.noted = engine, noted

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def sleep(self):
        self.noted.append("sleep")

    async def load(self, weights, version):
        self.noted.append(f"load {version}")
        await self.engine.load(weights, version)


@pytest.mark.parametrize("sleeps", [True, False])
def test_an_engine_that_sleeps_does_so_while_the_learner_works(sleeps, monkeypatch):
    parts = parts_of(2, "steps=2", "guards.max_logprob_gap=1e9")
    noted = []
    for name in ("score", "update", "release"):
        original = getattr(parts.learner, name)
        note = lambda *given, name=name, original=original: (noted.append(name), original(*given))[1]
        monkeypatch.setattr(parts.learner, name, note)

    async def make(draw):
        return make_group([0.0, 1.0], name=draw.task.id)

    async def after(progress, metrics, records, waiting):
        noted.append("after")

    engine = Sleeper(parts.engine, noted)
    engine.sleeps = sleeps
    asleep = replace(parts, engine=engine, stages=replace(parts.stages, make_group=make))
    asyncio.run(train(asleep, Progress(), after, asyncio.Event()))
    once = [name for name, before in zip(noted, ["", *noted], strict=False) if name != before]
    work = [name for name in once[: once.index("load 1")] if name not in ("sleep", "release")]
    around = (["sleep", *work, "release"], ["sleep", *work, "release"]) if sleeps else (work, work)
    assert once == [*around[0], "load 1", "after", *around[1], "load 2", "after"]
