import asyncio

import pytest

from support.acting import Puppet, hang, limits, renderer, run, says, user
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.rollout.group import AttemptMaker
from turnwise.types import Status, Task

TASK = Task("t-1", "hops", {"seed": 3})
DONE = Reply(finished=True, outcome=1.0)


class Scene:
    """A attempt_maker over environments made in order, and what its engine was asked."""

    def __init__(self, environments, attempts, retries=0, **bounds):
        self.made = []
        self.asked = []
        environments = iter(environments)

        def make():
            self.made.append(next(environments))
            return self.made[-1]

        def script(prompt, session, seed):
            self.asked.append((session, seed))
            return "hello"

        self.attempt_maker = AttemptMaker(
            {"hops": make, "guess": lambda: 1 / 0},
            says(script),
            renderer(),
            Sampling(99),
            limits(**bounds),
            seed=5,
            split="train",
            attempts=attempts,
            retries=retries,
        )

    def group(self, epoch=0, task=TASK):
        return run(self.attempt_maker.group(task, epoch))


def test_attempts_that_count_are_apart_from_those_that_do_not():
    environments = [
        Puppet(DONE),
        Puppet(RuntimeError("boom")),
        Puppet(*[Reply(user("on"))] * 2),
        Puppet(hang),
        Puppet(opening=Reply(user("x" * 9000))),
        Puppet(Reply(user("y" * 9000))),
        Puppet(Reply(finished=True, outcome=0.5)),
    ]
    group = Scene(environments, 7, call_seconds=0.2, max_turns=2).group()
    assert group.task is TASK
    assert [t.status for t in group.trajectories] == [
        Status.finished,
        Status.too_many_turns,
        Status.too_long,
        Status.finished,
    ]
    assert [t.outcome for t in group.trajectories] == [1.0, 0.0, 0.0, 0.5]
    assert [t.status for t in group.failed] == [Status.failed, Status.timed_out, Status.prompt_too_long]
    assert [environment.closed for environment in environments] == [1] * 7


def test_attempts_are_made_at_once():
    barrier = asyncio.Barrier(6)

    async def meet():
        await barrier.wait()
        return DONE

    assert len(Scene([Puppet(meet) for _ in range(6)], 6).group().trajectories) == 6


def test_every_attempt_has_its_own_noise_and_session():
    scene = Scene([Puppet(Reply(user("on")), DONE) for _ in range(12)], 4)
    for epoch in range(3):
        scene.group(epoch)
    assert len({seed for _, seed in scene.asked}) == 24
    assert len({session for session, _ in scene.asked}) == 12


def test_the_same_attempts_meet_the_same_noise():
    first, second = Scene([Puppet(DONE) for _ in range(4)], 4), Scene([Puppet(DONE) for _ in range(4)], 4)
    first.group(2), second.group(2)
    assert sorted(first.asked) == sorted(second.asked)


@pytest.mark.parametrize("wrong", [RuntimeError("boom"), hang])
def test_a_retry_has_a_fresh_environment_and_fresh_noise(wrong):
    environments = [Puppet(wrong), Puppet(wrong), Puppet(DONE), Puppet(DONE)]
    scene = Scene(environments, 1, retries=3, call_seconds=0.1)
    group = scene.group()
    assert [t.status for t in group.trajectories] == [Status.finished]
    assert group.failed == ()
    assert scene.made == environments[:3]
    assert [environment.closed for environment in environments] == [1, 1, 1, 0]
    assert len(set(scene.asked)) == 3
    assert len({session for session, _ in scene.asked}) == 3
    assert len({seed for _, seed in scene.asked}) == 3


def test_an_attempt_that_always_fails_is_counted_once():
    scene = Scene([Puppet(Reply(user("on"), reward=float(i)), RuntimeError()) for i in range(9)], 1, retries=2)
    group = scene.group()
    assert group.trajectories == ()
    assert len(scene.made) == 3
    assert [t.total for t in group.failed] == [2.0]  # the last try


@pytest.mark.parametrize("given", [{"opening": Reply(user("go"))}, {"opening": Reply(user("x" * 9000))}])
def test_what_would_only_repeat_itself_is_not_retried(given):
    scene = Scene([Puppet(**given) for _ in range(6)], 1, retries=5, max_turns=2)
    scene.group()
    assert len(scene.made) == 1


def test_failures_of_some_leave_the_others_alone():
    environments = [Puppet(RuntimeError()) if i % 2 else Puppet(Reply(user("on")), DONE) for i in range(8)]
    group = Scene(environments, 8).group()
    assert len(group.trajectories) == 4
    assert len(group.failed) == 4
    assert all(len(t.turns) == 2 and t.outcome == 1.0 for t in group.trajectories)


def test_the_dataset_chooses_the_environment():
    group = Scene([], 2).group(task=Task("g-1", "guess"))
    assert [t.status for t in group.failed] == [Status.failed] * 2  # its constructor divides by zero


def test_cancelling_a_group_closes_every_environment():
    environments = [Puppet(hang) for _ in range(5)]
    scene = Scene(environments, 5)

    async def leave():
        call = asyncio.create_task(scene.attempt_maker.group(TASK, 0))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    run(leave())
    assert [environment.closed for environment in environments] == [1] * 5
