"""Environment actors that die or stop answering, played without a cluster."""

import asyncio
from types import SimpleNamespace

import pytest

from turnwise.cluster import remote_envs
from turnwise.cluster.remote_envs import RemoteEnvironment, RemoteEnvironments
from turnwise.envs.base import Reply
from turnwise.rollout.calls import EnvironmentFailure

ray = pytest.importorskip("ray")


class Remote:
    """A method of an actor."""

    def __init__(self, call):
        self.remote = call


class PlayedActor:
    """Answers some checks, then does something else."""

    def __init__(self, answers, then):
        self.answers, self.then = answers, then
        self.check = Remote(self.answer)

    async def answer(self, *arguments):
        self.answers -= 1
        if self.answers < 0:
            await self.then()


async def dies():
    raise ray.exceptions.ActorDiedError


async def never():
    await asyncio.Event().wait()


class Nothing:
    """An environment of which none is made."""

    def step(self, message):
        return Reply(())


@pytest.mark.parametrize(("then", "answers"), [(dies, 0), (dies, 3), (never, 3)])
def test_an_actor_that_is_lost_is_killed_and_replaced_by_another(monkeypatch, then, answers):
    killed, good = [], PlayedActor(10**9, never)
    monkeypatch.setattr(remote_envs, "CHECK_SECONDS", 0.001)
    monkeypatch.setattr(ray, "kill", killed.append)
    lost = PlayedActor(answers, then)
    made = [good, PlayedActor(10**9, never)]
    kind = SimpleNamespace(remote=lambda make: made.pop(0))
    own = RemoteEnvironments(Nothing, actors=1, cluster=SimpleNamespace(answer_seconds=0.05, address=""))
    own.actors = [lost]

    async def work():
        own.watching = [asyncio.create_task(own.watch(0, kind, Nothing))]
        async with asyncio.timeout(60):
            while own.actors[0] is lost or good.answers > 10**9 - 5:
                await asyncio.sleep(0.001)
        own.close()

    asyncio.run(work())
    assert killed == [lost, good]  # the second by close
    assert len(made) == 1


def test_a_start_may_take_longer_than_an_answer(monkeypatch):
    monkeypatch.setattr(remote_envs, "CHECK_SECONDS", 0.001)
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    slow = PlayedActor(0, lambda: asyncio.sleep(0.2))
    own = RemoteEnvironments(Nothing, actors=1, cluster=SimpleNamespace(answer_seconds=0.05, address=""))
    own.actors = [slow]

    async def work():
        own.watching = [asyncio.create_task(own.watch(0, SimpleNamespace(remote=None), Nothing))]
        await asyncio.sleep(0.1)
        assert not killed
        own.watching[0].cancel()

    asyncio.run(work())


def test_a_call_to_a_lost_actor_is_a_failure_of_the_environment_in_one_line():
    actor = SimpleNamespace(step=Remote(lambda number, message: dies()))
    with pytest.raises(EnvironmentFailure, match="the actor of its environment has ended"):
        asyncio.run(RemoteEnvironment(actor, 0).step(None))
