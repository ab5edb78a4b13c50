"""Nothing opens without a bound: in training, evaluation, demonstrations, tiny-model building and play."""

import asyncio
import os
from functools import partial

import pytest

from support.acting import Puppet, attempted, limits, renderer, run, says, until, user
from support.assembling import environments_for
from support.running import micro_recipe, train, untimed
from turnwise.assemble.attempts import evaluation_attempts, training_attempts
from turnwise.assemble.environments import tasks_of
from turnwise.assemble.model import model_and_tokenizer, tiny_texts
from turnwise.assemble.models import ModelSource
from turnwise.assemble.warm_start import demonstrating
from turnwise.cli.commands import main
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.evaluation.evaluator import Evaluator
from turnwise.recipe.environment import BatchingConfig
from turnwise.recipe.parse import parse_recipe
from turnwise.rollout.batching.batches import Batches, lane_of, rule_of
from turnwise.rollout.concurrently import all_of
from turnwise.rollout.group import AttemptMaker
from turnwise.schedule.tasks import Draw
from turnwise.testing import clock
from turnwise.types import Status, Task


class Crowd:
    """Counts how many of its kind are alive."""

    costs_process = True
    alive = most = opened = 0

    @staticmethod
    def tasks(split, seed, count=40):
        return draw_tasks("crowd", split, count, seed, lambda random: {"n": random.getrandbits(30)})

    async def open(self, task):
        Crowd.alive += 1
        Crowd.most = max(Crowd.most, Crowd.alive)
        Crowd.opened += 1
        await asyncio.sleep(0)
        return Reply(user("say it"))

    async def step(self, message):
        await asyncio.sleep(0)
        return Reply(finished=True, outcome=float(message.content == "it"))

    async def close(self):
        Crowd.alive -= 1

    def demonstrate(self, noise, random):
        return "it"


class Object(Crowd):
    """The same, which costs no process."""

    costs_process = False


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    Crowd.alive = Crowd.most = Crowd.opened = 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


USUAL = 8
"""Processes for one core."""


def recipe_of(kind="Crowd", **entry):
    env = {"name": f"{__name__}:{kind}", "dataset": "crowd", **entry}
    small = {"hidden": 32, "layers": 1, "threads": 1}
    return parse_recipe({"env": [env], "model": small, "evaluation": {"attempts": 2}}, "here")


def made_in(recipe, where, folder):
    """Attempts of a recipe, at some of its tasks, as this part of a run makes them; how many were opened."""
    train_tasks, heldout = (tasks_of(recipe, split)["crowd"] for split in ("train", "heldout"))

    async def tiny():
        await tiny_texts(recipe, environments_for(recipe))

    async def training():
        attempt_maker = training_attempts(recipe, environments_for(recipe), says("it"), renderer())
        await all_of(attempt_maker.group(task, 0) for task in train_tasks[:8])

    async def evaluation():
        engine, speak = says("it"), renderer()
        attempts = partial(evaluation_attempts, recipe, environments_for(recipe), engine, speak)
        evaluator = Evaluator(engine, attempts, folder, success_at=1.0, decode=speak.decode)
        await evaluator.evaluate(0, heldout, greedy=False)

    async def demonstrations():
        environments = environments_for(recipe)
        model, tokenizer = await model_and_tokenizer(recipe, environments)
        Crowd.opened = Crowd.most = 0
        async with demonstrating(recipe, environments, ModelSource(model, tokenizer)) as parts:
            await asyncio.gather(*(parts.stages.make_group(Draw(n, task, 0)) for n, task in enumerate(train_tasks)))

    run(locals()[where](), seconds=120)
    return Crowd.opened


OPENED = {"tiny": 40, "training": 64, "evaluation": 80, "demonstrations": 40}


@pytest.mark.parametrize("where", OPENED)
def test_processes_alive_at_once_are_bounded_by_cores(where, tmp_path):
    assert made_in(recipe_of(), where, tmp_path) == OPENED[where]
    assert Crowd.most == USUAL
    assert Crowd.alive == 0


@pytest.mark.parametrize("where", OPENED)
@pytest.mark.parametrize("limit", [1, 3])
def test_a_recipe_may_set_the_bound(where, limit, tmp_path):
    assert made_in(recipe_of(concurrency={"max_open": limit}), where, tmp_path) == OPENED[where]
    assert Crowd.most == limit


def test_objects_have_a_larger_bound(tmp_path):
    assert made_in(recipe_of("Object"), "training", tmp_path) == 64
    assert Crowd.most == 64
    assert made_in(recipe_of("Object", tasks={"count": 400}), "evaluation", tmp_path) == 64 + 800
    assert Crowd.most == 256


def test_entries_that_say_nothing_share_what_the_machine_has():
    entries = [{"name": f"{__name__}:Crowd", "dataset": name} for name in ("a", "b")]
    own = {"name": f"{__name__}:Crowd", "dataset": "c", "concurrency": {"max_open": 3}}
    objects = {"name": f"{__name__}:Object", "dataset": "d"}
    datasets = environments_for(parse_recipe({"env": [*entries, own, objects]}, "here")).datasets
    assert datasets["a"].open_limit is datasets["b"].open_limit
    limits_of = {name: each.open_limit.limit for name, each in datasets.items()}
    assert limits_of == {"a": USUAL, "b": USUAL, "c": 3, "d": 256}


def test_play_opens_what_is_played_and_nothing_else(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda: "it")
    assert main(["play", f"{__name__}:Crowd"]) == 0
    assert "finished: total reward 1 in 1 turns" in capsys.readouterr().out
    assert Crowd.opened == 1


# ---------------------------------------------------------------- a place


def attempt_maker_of(make, open_limit, attempts=1, **bounds):
    from turnwise.rollout.open_limit import EnvironmentMaker

    environments = {"hops": EnvironmentMaker(make, open_limit)}
    return AttemptMaker(environments, says(), renderer(), Sampling(99), limits(**bounds), 0, "train", attempts)


def test_attempts_get_their_permits_in_the_order_they_came():
    from turnwise.rollout.open_limit import OpenLimit

    order = []

    class Named(Puppet):
        async def open(self, task):
            order.append(task.id)
            await asyncio.sleep(0)
            return Reply(user("go"))

    attempt_maker = attempt_maker_of(lambda: Named(Reply(finished=True)), OpenLimit(3))
    tasks = [Task(f"{number:02d}", "hops") for number in range(20)]
    run(all_of(attempt_maker.group(task, 0) for task in tasks))
    assert order == [task.id for task in tasks]


def test_deadlines_begin_with_the_place():
    """Ten attempts of one second each, one after the other, each with a deadline of three."""
    from turnwise.rollout.open_limit import OpenLimit

    async def second():
        await asyncio.sleep(1.0)
        return Reply(finished=True, outcome=1.0)

    attempt_maker = attempt_maker_of(lambda: Puppet(second), OpenLimit(1), 10, call_seconds=2.0, attempt_seconds=3.0)
    group = clock.run(attempt_maker.group(Task("t", "hops"), 0))
    assert [made.status for made in group.trajectories] == [Status.finished] * 10


def test_a_cancelled_wait_takes_no_permit():
    from turnwise.rollout.open_limit import OpenLimit

    async def scene(open_limit, through):
        door = asyncio.Event()

        async def enter():
            async with through.permit():
                await door.wait()

        inside = asyncio.create_task(enter())
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(enter()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        inside.cancel()  # which wakes the one behind, while that is given up too
        waiting[1].cancel()
        door.set()
        await asyncio.wait_for(waiting[2], 5)
        await asyncio.gather(inside, *waiting, return_exceptions=True)
        assert not open_limit.free.locked()

    for limit in (1, 2):
        open_limit = OpenLimit(limit)
        run(scene(open_limit, open_limit))
        run(scene(open_limit, open_limit.half()))


def test_overlapping_validation_leaves_half_of_the_permits(tmp_path):
    recipe = recipe_of(concurrency={"max_open": 4})
    beside = recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"overlap_evaluations": True})})
    alone, environments = environments_for(recipe), environments_for(beside)
    training, validation = environments.training()["crowd"], environments.validation()["crowd"]
    assert alone.validation()["crowd"].open_limit is alone.datasets["crowd"].open_limit
    assert training.open_limit is environments.datasets["crowd"].open_limit

    async def scene():
        door = asyncio.Event()
        inside = []

        async def enter(maker, name):
            async with maker.open_limit.permit():
                inside.append(name)
                await door.wait()

        first = [asyncio.create_task(enter(validation, "validation")) for _ in range(9)]
        await asyncio.sleep(0)
        later = [asyncio.create_task(enter(training, "training")) for _ in range(9)]
        await until(lambda: len(inside) == 4)
        assert sorted(inside) == ["training"] * 2 + ["validation"] * 2
        door.set()
        await asyncio.gather(*first, *later)
        assert len(inside) == 18

    run(scene())


def test_a_permit_is_released_however_the_attempt_ends():
    from turnwise.rollout.open_limit import EnvironmentMaker, OpenLimit

    def broken():
        raise RuntimeError("no such game")

    async def never():
        await asyncio.sleep(3600)

    maker = EnvironmentMaker(broken, OpenLimit(1))
    failing = [maker, lambda: Puppet(never), lambda: Puppet(opening=ValueError("x")), lambda: Puppet(closing=never)]

    async def scene():
        for make in failing * 2:
            own = make if make is maker else EnvironmentMaker(make, maker.open_limit)
            await attempted(own, call_seconds=0.5, attempt_seconds=1.0)
            assert not maker.open_limit.free.locked()

    clock.run(scene())


# ---------------------------------------------------------------- beside micro-batches, lag and each other


class Together(Crowd):
    """Steps and closes together with others, for as many turns as its task says."""

    async def open(self, task):
        self.left = task.data["turns"]
        return await super().open(task)

    @classmethod
    async def step_many(cls, environments, messages):
        await asyncio.sleep(1.0)
        for environment in environments:
            environment.left -= 1
        return [Reply(user("on"), finished=environment.left == 0) for environment in environments]

    @classmethod
    async def close_many(cls, environments):
        await asyncio.sleep(1.0)
        Crowd.alive -= len(environments)
        return [None] * len(environments)


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize(
    "settings", [BatchingConfig(policy="lockstep"), BatchingConfig(max_wait=30.0), BatchingConfig()]
)
def test_batched_calls_do_not_wait_for_attempts_without_a_place(settings, limit):
    """In virtual time, in which a deadlock is an error."""
    from turnwise.rollout.open_limit import OpenLimit

    batches = Batches(Together, rule=rule_of(settings), slots=2, call_seconds=60.0, open_limit=OpenLimit(limit))
    make = batches.wrap(Together, lane_of(settings, validation=False))
    bounds = limits(call_seconds=100.0, attempt_seconds=1000.0)
    attempt_maker = AttemptMaker({"hops": make}, says(), renderer(), Sampling(99), bounds, 0, "train", attempts=3)
    tasks = [Task(f"t-{turns}", "hops", {"turns": turns}) for turns in (1, 3, 2, 5)]

    async def scene():
        return await all_of(attempt_maker.group(task, 0) for task in tasks)

    groups = clock.run(scene())
    assert [len(made.turns) for group in groups for made in group.trajectories] == [1] * 3 + [3] * 3 + [2] * 3 + [5] * 3
    assert Crowd.most == limit


FEW = ["evaluation.final_tasks=3", "evaluation.tasks=3"]


@pytest.mark.slow
def test_the_order_of_opening_changes_no_token_and_no_weight(tmp_path):
    """At lag 0, with one place, four, and more than there are attempts. The engine rounds by how many rows it has, so
    that the gap between its logprobs and the learner's is all that differs."""
    metrics, weights = [], []
    game = ["env.0.name=guess", "env.0.tasks={high=9,count=12}", "sft.updates=20", "loss.anchor=learner", "steps=1"]
    for limit in (1, 4, 1000):
        folder = tmp_path / str(limit)
        folder.mkdir()
        train(micro_recipe(folder, f"env.0.concurrency.max_open={limit}", *game, *FEW))
        lines = untimed(folder / "run" / "metrics.jsonl")
        metrics.append([{k: str(v) for k, v in line.items() if not k.startswith("gap/")} for line in lines])
        weights.append((folder / "run" / "checkpoints" / "step-000001" / "model.safetensors").read_bytes())
    assert float(metrics[0][1]["gradient_norm"]) > 0
    assert metrics[0] == metrics[1] == metrics[2]
    assert weights[0] == weights[1] == weights[2]


def test_one_place_is_enough_at_any_lag(tmp_path):
    beside = ["max_lag=2", "schedule.overlap_evaluations=true", "evaluation.every=1", "sft={}", "steps=2"]
    assert train(micro_recipe(tmp_path, "env.0.concurrency.max_open=1", *beside, *FEW))["updates"] == 2
