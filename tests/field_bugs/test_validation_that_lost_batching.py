"""Validation that lost batched environment calls.

Elsewhere training called its environments for a whole batch of attempts at once. Validation moved to a copy of the loop
that ran attempts one by one, each with calls of its own: a judge or a reward model with a price per call, not per item,
then took many times as long.
"""

import asyncio

import pytest

from support.acting import limits, renderer, run, says, user
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.evaluation.result import Result, evaluate
from turnwise.rollout.group import AttemptMaker
from turnwise.schedule.stream import GroupStream, LagSlots
from turnwise.schedule.take import take
from turnwise.schedule.tasks import Draw
from turnwise.types import Group, Task

TURNS = (1, 2, 2, 4, 3)
TASKS = [Task(f"task-{number}", "judged", {"turns": turns}) for number, turns in enumerate(TURNS)]
ATTEMPTS = 2
ROUNDS = [ATTEMPTS * sum(turns > number for turns in TURNS) for number in range(max(TURNS))]
"""Attempts still under way in each round."""


class Judge:
    """Answers all who wait in one call, once everybody who can ask has asked."""

    def __init__(self):
        self.waiting = []
        self.calls = []

    async def ask(self, environment):
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((environment, answer))
        if len(self.waiting) == 1:
            asyncio.get_running_loop().create_task(self.collect())
        return await answer

    async def collect(self):
        size = 0
        while size < len(self.waiting):
            size = len(self.waiting)
            for _ in range(3):
                await asyncio.sleep(0)
        asked, self.waiting = self.waiting, []
        replies = self.reply_to([environment for environment, _ in asked])
        for (_, answer), reply in zip(asked, replies, strict=True):
            answer.set_result(reply)

    def reply_to(self, environments):
        """One call, for any number of environments."""
        self.calls.append(len(environments))
        return [environment.reply() for environment in environments]


class Judged:
    """An environment that lasts as many turns as its task says, and asks a judge about each."""

    def __init__(self, judge):
        self.judge = judge

    async def open(self, task):
        self.left = task.data["turns"]
        return Reply(user("go"))

    async def step(self, message):
        return await self.judge.ask(self)

    async def close(self):
        return None

    def reply(self):
        self.left -= 1
        return Reply(user("on"), finished=self.left == 0, outcome=float(self.left == 0))


def practice_with(judge, split):
    return AttemptMaker(
        environments={"judged": lambda: Judged(judge)},
        engine=says(),
        renderer=renderer(),
        sampling=Sampling(50),
        limits=limits(),
        seed=0,
        split=split,
        attempts=ATTEMPTS,
    )


def calls_in_training():
    """Sizes of the calls while a step's groups are made."""
    judge = Judge()
    practice = practice_with(judge, "train")
    draws = iter([Draw(number, task, 0) for number, task in enumerate(TASKS)])

    async def work():
        make_group = lambda draw: practice.group(draw.task, draw.epoch)
        async with GroupStream(lambda: next(draws), make_group, LagSlots(len(TASKS)), len(TASKS)) as stream:
            return await take(stream, len(TASKS), lambda group: True, limit=9)

    assert all(len(group.trajectories) == ATTEMPTS for group in run(work()).kept)
    return judge.calls


def check_validation_asks_as_training_does(validate, judge):
    """Validation asks for all of its attempts at once: as many calls as the longest attempt has turns."""
    result = run(validate(practice_with(judge, "heldout/sampled"), TASKS, 1.0))
    assert (result.num_attempts, result.success) == (len(TASKS) * ATTEMPTS, 1.0)
    assert judge.calls == ROUNDS, f"{len(judge.calls)} calls where {len(ROUNDS)} rounds are enough"
    assert judge.calls == calls_in_training()


async def one_by_one(practice, tasks, success_at):
    """Validation that waits for each attempt before it makes the next."""
    groups = []
    for task in tasks:
        made = [await practice.one(task, 0, number) for number in range(practice.attempts)]
        groups.append(Group(task, tuple(made)))
    return Result(tuple(groups), success_at)


class JudgeOfOne(Judge):
    """What an attempt of its own loop asks: a call for it alone, however many others wait."""

    async def ask(self, environment):
        [reply] = self.reply_to([environment])
        return reply


def test_validation_batches_as_training_does():
    check_validation_asks_as_training_does(evaluate, Judge())


def test_one_attempt_after_another_is_caught():
    with pytest.raises(AssertionError, match=f"{ATTEMPTS * sum(TURNS)} calls where {max(TURNS)} rounds are enough"):
        check_validation_asks_as_training_does(one_by_one, Judge())


def test_a_call_for_each_attempt_is_caught():
    with pytest.raises(AssertionError, match=f"{ATTEMPTS * sum(TURNS)} calls where {max(TURNS)} rounds are enough"):
        check_validation_asks_as_training_does(evaluate, JudgeOfOne())
