"""Replicas behind one engine: who gets a call, and what happens when one of them dies."""

import asyncio
import os
import signal

import numpy as np
import pytest
import torch

from engines.remote.processes import start_router
from support.acting import tiny_model, until
from support.running import micro_recipe, train
from turnwise.assemble import engines as building
from turnwise.engines.base import Completion, EngineFailure, Sampling
from turnwise.engines.remote.router import Router
from turnwise.runs.archive import archived_steps, read_step
from turnwise.types import StopReason
from turnwise.weights.publisher import Publisher

PROMPT = np.arange(1, 10, dtype=np.int32)


class Puppet:
    """A replica that answers when it is told to, and dies when it is told to."""

    shares_weights = False
    context = 100

    def __init__(self, number):
        self.number = number
        self.waiting = []
        self.sessions = []
        self.version = 0
        self.name = f"replica {number}"
        self.dead = self.paused = self.closed = self.stuck = False
        self.seconds = 0.0
        self.opened = 0

    async def generate(self, prompt, sampling, *, session, seed):
        self.alive()
        self.sessions.append(session)
        call = asyncio.get_running_loop().create_future()
        self.waiting.append(call)
        await call
        one = np.full(1, self.number, np.int32)
        return Completion(one, np.zeros(1, np.float32), one * 0 + self.version, StopReason.length)

    def alive(self):
        if self.dead:
            raise EngineFailure(f"replica {self.number} is gone")

    def answer(self):
        for call in self.waiting:
            if not call.done():
                call.set_result(None)
        self.waiting = []

    def die(self, reason="killed"):
        self.dead = True
        for call in self.waiting:
            if not call.done():
                call.set_exception(EngineFailure(reason))
        self.waiting = []

    async def load(self, weights, version):
        self.alive()
        self.weights, self.version = {name: tensor.clone() for name, tensor in weights.items()}, version

    async def open(self):
        self.opened += 1
        await self.check()

    async def check(self):
        if self.stuck:
            await asyncio.sleep(3600)
        self.alive()

    async def abort(self, session):
        self.alive()

    async def forget(self):
        self.alive()

    async def pause(self):
        self.alive()
        self.paused = True

    async def resume(self):
        self.alive()
        self.paused = False

    async def close(self):
        self.closed = True
        self.die("closed")


class Theatre:
    """A router over puppets, all that were ever made."""

    def __init__(self, folder, replicas=2, **settings):
        self.made = []
        self.stillborn = False
        self.publisher = Publisher(folder)
        self.router = Router(self.start, replicas, self.publisher, **{"check_seconds": 0.02, **settings})

    def start(self, number):
        self.made.append(Puppet(number))
        self.made[-1].dead = self.stillborn
        return self.made[-1]

    def ask(self, session):
        call = self.router.generate(PROMPT, Sampling(1), session=session, seed=0)
        return asyncio.create_task(call)

    async def until_asked(self, count):
        await until(lambda: sum(len(puppet.waiting) for puppet in self.made) == count)


def play(tmp_path, scene, **settings):
    """What a scene gives that gets a theatre."""

    async def bounded():
        theatre = Theatre(tmp_path, **settings)
        async with asyncio.timeout(60):
            result = await scene(theatre)
            await theatre.router.close()
        assert not theatre.publisher.folder.exists()
        return result

    return asyncio.run(bounded())


def test_sessions_spread_and_stay(tmp_path):
    async def scene(theatre):
        first = [theatre.ask(f"s{number}") for number in range(6)]
        await theatre.until_asked(6)
        spread = [list(puppet.sessions) for puppet in theatre.made]
        for puppet in theatre.made:
            puppet.answer()
        homes = [int((await call).tokens[0]) for call in first]
        again = [theatre.ask(f"s{number}") for number in (0, 2, 4)]  # all of them from one replica
        await theatre.until_asked(3)
        for puppet in theatre.made:
            puppet.answer()
        return spread, homes, [int((await call).tokens[0]) for call in again]

    spread, homes, again = play(tmp_path, scene)
    assert [len(sessions) for sessions in spread] == [3, 3]
    assert again == [homes[0], homes[2], homes[4]]


def test_a_call_whose_replica_dies_is_made_by_another(tmp_path):
    async def scene(theatre):
        calls = [theatre.ask(f"s{number}") for number in range(4)]
        await theatre.until_asked(4)
        theatre.made[0].die()
        await until(lambda: len(theatre.made[1].waiting) + sum(len(p.waiting) for p in theatre.made[2:]) == 4)
        for puppet in theatre.made[1:]:
            puppet.answer()
        return [int((await call).tokens[0]) for call in calls], theatre.router.slots[0].num_starts

    made_by, starts = play(tmp_path, scene)
    assert len(made_by) == 4
    assert starts == 2


def test_a_replica_that_comes_back_has_the_present_weights_and_is_paused_like_the_rest(tmp_path):
    async def scene(theatre):
        await theatre.router.load({"a": torch.zeros(3)}, 4)
        theatre.made[1].dead = True
        await theatre.router.pause()
        await theatre.router.load({"a": torch.ones(3)}, 5)
        await until(lambda: theatre.router.slots[1].ready.is_set())
        return theatre.made[0], theatre.made[2]

    for puppet in play(tmp_path, scene):
        assert puppet.version == 5
        assert puppet.paused
        assert puppet.weights["a"].tolist() == [1.0] * 3


def test_an_idle_replica_that_dies_is_noticed_and_so_is_one_that_hangs(tmp_path):
    async def scene(theatre):
        await theatre.router.open()
        theatre.made[0].dead = True
        call = theatre.ask("s")
        await until(lambda: theatre.router.slots[0].num_starts == 2)
        theatre.made[1].stuck = True
        await until(lambda: theatre.router.slots[1].num_starts == 2)
        await until(lambda: any(puppet.waiting for puppet in theatre.made))
        for puppet in theatre.made:
            puppet.answer()
        await call
        return theatre.made[1].closed

    assert play(tmp_path, scene, answer_seconds=0.05)


def test_the_seconds_of_a_replica_that_died_are_not_lost(tmp_path):
    async def scene(theatre):
        await theatre.router.open()
        theatre.made[0].seconds, theatre.made[1].seconds = 2.0, 3.0
        theatre.made[0].dead = True
        await until(lambda: theatre.router.slots[0].num_starts == 2 and theatre.router.slots[0].ready.is_set())
        theatre.made[2].seconds = 0.5
        return theatre.router.seconds, [puppet.opened for puppet in theatre.made]

    seconds, opened = play(tmp_path, scene)
    assert seconds == 5.5
    assert opened[:2] == [1, 1]


def test_calls_wait_while_there_is_no_replica(tmp_path):
    async def scene(theatre):
        call = theatre.ask("s")
        await theatre.until_asked(1)
        theatre.made[0].die()
        await until(lambda: len(theatre.made) == 2 and theatre.made[1].waiting)
        theatre.made[1].answer()
        return (await call).stop

    assert play(tmp_path, scene, replicas=1) is StopReason.length


def test_a_slot_whose_replicas_never_start_is_given_up(tmp_path):
    async def scene(theatre):
        await theatre.router.open()
        theatre.stillborn = True
        theatre.made[0].die()
        with pytest.raises(EngineFailure, match="no replica is left: replica 0 is gone"):
            await theatre.ask("s")
        return len(theatre.made)

    assert play(tmp_path, scene, replicas=1) == 4


def test_a_failed_call_is_repeated_on_another_replica_and_then_reported(tmp_path):
    async def scene(theatre):
        async def fail(*_, **__):
            raise EngineFailure("a step failed")

        for puppet in theatre.made:
            puppet.generate = fail
        with pytest.raises(EngineFailure, match="a step failed"):
            await theatre.ask("s")
        return len(theatre.made)

    assert play(tmp_path, scene) == 2


@pytest.mark.slow
def test_killing_one_of_two_processes_in_a_run_loses_no_attempt_and_it_is_used_again(tmp_path, monkeypatch):
    routers, seen = [], {}
    open_router = building.process_engines

    def watched(*arguments):
        routers.append(open_router(*arguments))
        return routers[-1]

    async def kill_in_the_middle(router, load, weights, version):
        await load(weights, version)
        if version == 2:
            victim = router.slots[0]
            seen["served"] = victim.num_served
            await until(lambda: victim.num_calls > 0, 60)
            os.kill(victim.replica.process.pid, signal.SIGKILL)
        if version == 3:  # wait for it here, so that it has work left to do
            await until(lambda: router.slots[0].ready.is_set() and router.slots[0].num_starts == 2, 120)
            seen["after"] = router.slots[0].num_served

    def watched_engines(*arguments):
        router = watched(*arguments)
        load = router.load
        router.load = lambda weights, version: kill_in_the_middle(router, load, weights, version)
        return router

    monkeypatch.setattr(building, "process_engines", watched_engines)
    overrides = ["engine.processes=2", "max_lag=1", "steps=5", "sft.updates=0", "evaluation.every=0"]
    recipe = micro_recipe(
        tmp_path, *overrides, "evaluation.final_tasks=4", "rollout.failures.retries=0", "rollout.limits.call_seconds=90"
    )
    summary = train(recipe)
    [router] = routers
    assert summary["updates"] == 5
    steps = archived_steps(tmp_path / "run" / "archive")
    groups = [record.group for step in steps for record in read_step(tmp_path / f"run/archive/step-{step:06d}.parquet")]
    assert len(groups) == 5 * recipe.groups_per_step
    assert all(len(group.trajectories) == recipe.rollout.group_size and not group.failed for group in groups)
    assert router.slots[0].num_starts == 2
    assert router.slots[1].num_starts == 1
    assert router.slots[0].num_served > seen["after"] >= seen["served"] > 0


@pytest.mark.slow
def test_a_real_replica_that_is_killed_in_the_middle_of_a_call(tmp_path):
    """The call is made again with the same seed, and gives the same tokens."""

    async def scene():
        router = start_router(tiny_model(tied=True), tmp_path)
        ask = lambda: router.generate(PROMPT, Sampling(40), session="s", seed=3)
        expected = await ask()
        home = router.session_slots["s"]
        await router.pause()
        call = asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        os.kill(home.replica.process.pid, signal.SIGKILL)
        await until(lambda: home.num_starts == 2 and home.ready.is_set(), 100)
        await router.resume()
        found = await call
        await router.close()
        return expected, found

    async def bounded():
        async with asyncio.timeout(200):
            return await scene()

    expected, found = asyncio.run(bounded())
    assert found.tokens.tolist() == expected.tokens.tolist()


class Unreadable:
    """A store of weights that can be read while they are loaded, and not again."""

    newest = None

    def publish(self, weights, version):
        return weights

    def close(self):
        return None


def test_a_replica_whose_weights_cannot_be_read_again_waits_for_the_next_load(tmp_path):
    async def scene(theatre):
        theatre.router.publisher = Unreadable()
        await theatre.router.load({"a": torch.zeros(3)}, 4)
        theatre.made[1].dead = True
        theatre.router.start_health_checks()
        await until(lambda: theatre.router.slots[1].waits_for_load)
        was_ready = theatre.router.slots[1].ready.is_set()
        await theatre.router.load({"a": torch.ones(3)}, 5)
        theatre.publisher.close()
        return was_ready, theatre.router.slots[1].ready.is_set(), theatre.made[2].version

    assert play(tmp_path, scene) == (False, True, 5)


def test_a_replica_that_could_not_load_is_replaced_where_another_could(tmp_path):
    async def scene(theatre):
        await theatre.router.open()

        async def fail(weights, version):
            raise EngineFailure("no memory")

        theatre.made[1].load = fail
        await theatre.router.load({"a": torch.ones(3)}, 5)
        was_ready = theatre.router.slots[1].ready.is_set()
        await until(lambda: theatre.router.slots[1].ready.is_set())
        theatre.made[0].load = theatre.made[2].load = fail
        with pytest.raises(EngineFailure, match="no memory"):  # by all of them, and they live
            await theatre.router.load({"a": torch.ones(3)}, 6)
        return was_ready, theatre.made[2].version

    assert play(tmp_path, scene) == (False, 5)


def test_a_replica_that_is_never_given_up_is_tried_until_it_starts(tmp_path):
    async def scene(theatre):
        await theatre.router.open()
        theatre.stillborn = True
        theatre.made[0].die()
        call = theatre.ask("s")
        await until(lambda: len(theatre.made) > 6)
        theatre.stillborn = False
        await until(lambda: theatre.made[-1].waiting)
        theatre.made[-1].answer()
        return (await call).stop

    assert play(tmp_path, scene, replicas=1, starts=None, check_seconds=0.001) is StopReason.length
