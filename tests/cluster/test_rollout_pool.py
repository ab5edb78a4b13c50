"""Rollout workers in the event loop of the test: what they make, what they share, and what their loss costs."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

from cluster.workers_here import Counts, HostHere, environments_of_run, maker_of, parts, pool_here
from support.acting import renderer
from support.running import in_run_loop
from turnwise.cluster import rollout_pool
from turnwise.cluster.call_gate import CallGate
from turnwise.cluster.rollout_pool import LOSSES, RolloutPool
from turnwise.engines.places import place_of_new
from turnwise.engines.remote.wire import framed
from turnwise.engines.scripted import ScriptedEngine
from turnwise.rollout.concurrently import all_of
from turnwise.schedule.stopping import RunStopped
from turnwise.types import Group, Status, Task

TASKS = [Task(f"t-{number}", "e") for number in range(5)]


def engine_by_seed() -> ScriptedEngine:
    """Says something else for every seed."""
    spell = renderer()
    return ScriptedEngine(
        lambda prompt, session, seed: f"get {seed}", lambda text: list(spell.encode(text)), end_token=2
    )


def tokens_of(groups: list[Group]) -> list[list[list[int]]]:
    return [
        [[*turn.prompt.tolist(), *turn.action.tolist()] for made in group.trajectories for turn in made.turns]
        for group in groups
    ]


async def made_by(pool: RolloutPool, tasks: list[Task]) -> list[Group]:
    attempts = pool.attempts("train", 3)
    return await all_of(attempts.group(task, 0) for task in tasks)


def made_here() -> list[Group]:
    async def scene() -> list[Group]:
        maker = maker_of({"e": Counts}, engine_by_seed())
        return await all_of(maker.group(task, 0) for task in TASKS)

    return asyncio.run(scene())


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_groups_are_those_of_one_process(workers: int) -> None:
    async def scene() -> list[Group]:
        async with pool_here(engine_by_seed(), workers) as pool:
            return await made_by(pool, TASKS)

    groups = asyncio.run(scene())
    assert len(groups[0].trajectories) == 3
    assert all(len(made.turns) == 3 for made in groups[0].trajectories)
    assert tokens_of(groups) == tokens_of(made_here())
    assert Counts.open_now == 0


def test_turns_of_a_group_share_one_buffer_when_they_come_back() -> None:
    async def scene() -> list[Group]:
        async with pool_here(engine_by_seed()) as pool:
            return await made_by(pool, TASKS[:1])

    [group] = asyncio.run(scene())
    first, second, third = group.trajectories[0].turns
    assert np.shares_memory(first.prompt, third.prompt)
    assert np.shares_memory(second.action, third.prompt)
    assert not third.prompt.flags.writeable


def test_all_workers_together_open_no_more_environments_than_allowed() -> None:
    async def scene() -> None:
        async with pool_here(engine_by_seed(), 3, environments=environments_of_run(most_open=4)) as pool:
            await made_by(pool, TASKS)

    asyncio.run(scene())
    assert Counts.most_open == 4


def test_a_worker_that_is_lost_costs_no_group_and_its_attempts_begin_with_the_noise_of_a_retry() -> None:
    async def scene() -> list[Group]:
        engine = engine_by_seed()
        async with pool_here(engine, 2) as pool:
            making = asyncio.create_task(made_by(pool, TASKS))
            while not engine.prompts:
                await asyncio.sleep(0)
            HostHere.started[0].kill()
            groups = await making
            assert len(HostHere.started) == 3
            return groups

    groups = asyncio.run(scene())
    assert [group.task for group in groups] == TASKS
    assert all(len(group.trajectories) == 3 and not group.failed for group in groups)
    same = [one == other for one, other in zip(tokens_of(groups), tokens_of(made_here()), strict=True)]
    assert sorted(same) == [False] * 3 + [True] * 2, "those of the lost worker have other noise, the rest has not"


def test_a_task_that_kills_every_worker_becomes_failed_attempts(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> Group:
        async with pool_here(engine_by_seed(), 1) as pool:
            making = asyncio.create_task(made_by(pool, [Task("bad", "e", {"waits": True})]))
            for number in range(LOSSES):
                while len(HostHere.started) <= number or not pool.slots[0].jobs:
                    await asyncio.sleep(0.001)
                HostHere.started[number].kill()
                while pool.slots[0].link is not None and not making.done():
                    await asyncio.sleep(0.001)
            return (await making)[0]

    group = asyncio.run(scene())
    assert not group.trajectories
    assert [made.status for made in group.failed] == [Status.failed] * 3
    assert "was lost 3 times" in group.failed[0].failure
    assert "worker 0 is gone" in caplog.text


def test_failures_and_warnings_of_a_worker_are_those_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    environments = environments_of_run()

    async def scene() -> Group:
        async with pool_here(engine_by_seed(), 2, environments=environments) as pool:
            [group] = await made_by(pool, [Task("bad", "e", {"fails": True})])
            return group

    group = asyncio.run(scene())
    assert [made.status for made in group.failed] == [Status.failed] * 3
    assert sum(environments.failures.counted.values()) == 3
    assert caplog.text.count("this one fails") >= 1
    assert "train/e/bad/0/" in caplog.text


def test_a_cancelled_group_closes_its_environments() -> None:
    async def scene() -> None:
        async with pool_here(engine_by_seed(), 1) as pool:
            making = asyncio.create_task(made_by(pool, [Task("slow", "e", {"waits": True})]))
            while Counts.open_now < 3:
                await asyncio.sleep(0.001)
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
            assert Counts.open_now == 0
            assert not pool.slots[0].jobs
            assert len(await made_by(pool, TASKS[:1])) == 1

    asyncio.run(scene())


def test_leaving_the_pool_closes_environments_of_groups_under_way() -> None:
    async def scene() -> None:
        async with pool_here(engine_by_seed(), 2) as pool:
            making = asyncio.create_task(made_by(pool, [Task("slow", "e", {"waits": True})]))
            while Counts.open_now < 3:
                await asyncio.sleep(0.001)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)

    asyncio.run(scene())
    assert Counts.open_now == 0


class SilentHost(HostHere):
    """The first worker hears nothing after it is ready."""

    async def serve(self) -> None:
        if len(HostHere.started) > 1:
            await super().serve()
            return
        await asyncio.get_running_loop().sock_sendall(self.theirs, framed([("ready",)]))
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.theirs.close()


class CutOffHost(SilentHost):
    """The network to the first worker is gone: killing it does not reach it, and its line stays open. Nor does it take
    what is sent."""

    def kill(self) -> None:
        if self is not HostHere.started[0]:
            super().kill()


@pytest.mark.parametrize("start", [SilentHost, CutOffHost])
def test_a_worker_that_says_nothing_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start: type[SilentHost]
) -> None:
    monkeypatch.setattr(rollout_pool, "TICK_SECONDS", 0.05)

    async def scene() -> list[Group]:
        async with pool_here(engine_by_seed(), 1, start=start, stall_seconds=1.0) as pool:
            if start is CutOffHost:  # more than the socket holds
                pool.slots[0].link.line.send("fills", bytes(1 << 22))
            return await made_by(pool, TASKS[:1])

    [group] = in_run_loop(scene())
    assert len(group.trajectories) == 3
    assert "it said nothing for 1 s; 1 groups of it begin anew" in caplog.text


class BrokenHost(HostHere):
    """A worker that cannot make its parts, and says so."""

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_recv(self.theirs, 1 << 20)
        await loop.sock_sendall(self.theirs, framed([("broken", "ValueError: no such thing")]))
        self.theirs.close()


def test_a_worker_that_never_starts_stops_the_run_in_one_line() -> None:
    async def scene() -> None:
        async with pool_here(engine_by_seed(), 2, start=BrokenHost):
            raise AssertionError("it started")

    with pytest.raises(RunStopped, match="rollout worker . did not start: ValueError: no such thing; mend that"):
        asyncio.run(scene())


def test_a_worker_retries_its_attempts_itself() -> None:
    environments = environments_of_run()

    async def scene() -> Group:
        make = partial(parts, retries=2)
        async with pool_here(engine_by_seed(), 1, make=make, environments=environments) as pool:
            return (await made_by(pool, [Task("bad", "e", {"fails": True})]))[0]

    group = asyncio.run(scene())
    assert len(group.failed) == 3
    assert sum(environments.failures.counted.values()) == 9


# ---------------------------------------------------------------- the gate


class Ordered:
    is_deterministic = True

    def __init__(self) -> None:
        self.coming: set[asyncio.Future[Any]] = set()


def test_nothing_passes_the_gate_before_all_workers_wait_and_then_by_place() -> None:
    async def scene() -> None:
        engine: Any = Ordered()
        gate, passed = CallGate([engine]), []
        gate.sent("one")
        gate.sent("two")
        assert len(engine.coming) == 2
        for name, place in (("c", place_of_new(2, 0)), ("a", (0, 4)), ("b", place_of_new(1, 1))):
            gate.enter(place, partial(passed.append, name))
        gate.waits("one")
        assert passed == []
        assert len(engine.coming) == 1
        gate.waits("two")
        assert passed == ["a", "b", "c"]
        assert not engine.coming
        gate.enter((0, 0), lambda: passed.append("later"))
        assert passed[-1] == "later"
        gate.waits("a stranger")

    asyncio.run(scene())


def test_a_gate_without_a_deterministic_engine_lets_everything_through() -> None:
    async def scene() -> None:
        engine: Any = engine_by_seed()
        gate, passed = CallGate([engine]), []
        gate.sent("one")
        gate.enter((0, 0), lambda: passed.append(1))
        assert passed == [1]
        assert not gate.is_ordered

    asyncio.run(scene())
