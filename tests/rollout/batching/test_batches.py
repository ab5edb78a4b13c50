import asyncio
import threading
from functools import cache
from random import Random
from typing import Any

import pytest

from support import acting
from support.acting import limits, renderer, says, user
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.envs.capabilities import is_batchable
from turnwise.evaluation.result import Result, evaluate
from turnwise.recipe.environment import BatchingConfig
from turnwise.rollout.batching.batches import Batches, lane_of, rule_of
from turnwise.rollout.batching.flush import Adaptive, Lockstep
from turnwise.rollout.batching.microbatch import Lane
from turnwise.rollout.group import AttemptMaker
from turnwise.seeds import seed_of
from turnwise.testing.clock import run
from turnwise.types import Status, Task

POLICIES = {
    "adaptive": BatchingConfig(),
    "adaptive, held back": BatchingConfig(max_wait=3.0),
    "adaptive, small": BatchingConfig(max_batch=3, slots=2),
    "lockstep": BatchingConfig(policy="lockstep", slots=1),
    "lockstep in parts": BatchingConfig(policy="lockstep"),
    "per attempt": BatchingConfig(policy="per_attempt"),
}


class Graded:
    """Lasts as many turns as its task says, pays per turn by what was said, and is graded when it closes."""

    per_call, per_item = 2.0, 0.1

    def __init__(self, log):
        self.log = log
        self.closed = 0
        log.made.append(self)

    async def open(self, task):
        self.task = task
        self.left = task.data["turns"]
        self.heard = []
        return Reply(user("go"))

    async def step(self, message):
        raise AssertionError("step_many is there")

    async def close(self):
        raise AssertionError("close_many is there")

    @classmethod
    async def step_many(cls, environments, messages):
        environments[0].log.steps.append(len(environments))
        await asyncio.sleep(cls.per_call + cls.per_item * len(environments))
        return [
            environment.answer(message.content) for environment, message in zip(environments, messages, strict=True)
        ]

    def answer(self, text):
        self.heard.append(text)
        self.left -= 1
        return Reply(user(f"heard {text}"), reward=len(text) / 8, finished=self.left == 0)

    @classmethod
    async def close_many(cls, environments):
        environments[0].log.closes.append(len(environments))
        await asyncio.sleep(cls.per_call)
        return [environment.grade() for environment in environments]

    def grade(self):
        self.closed += 1
        return Reply(outcome=float(len(set(self.heard))), marks={"heard": len(self.heard)})


class Log:
    """What happened to the environments of one class."""

    def __init__(self):
        self.made, self.steps, self.closes = [], [], []


def slow_speech(prompt, session, seed):
    """Says something, and takes a while, as the noise of the turn will have it."""

    async def say():
        random = Random(seed)
        await asyncio.sleep(random.lognormvariate(0, 1))
        return "x" * random.randint(1, 8)

    return say()


@cache
def one_renderer():
    return renderer()


def attempt_maker(kind, log, settings, script=slow_speech, validation=True, attempts=1, retries=0, **bounds):
    """A attempt_maker over a batched class of environments, and what batches it."""
    seconds = bounds.get("call_seconds", 500.0)
    batches = Batches(kind, rule=rule_of(settings), slots=settings.slots, call_seconds=seconds)
    make = batches.wrap(lambda: kind(log), lane_of(settings, validation=validation))
    patient = {"call_seconds": 500.0, "attempt_seconds": 5000.0}
    return batches, AttemptMaker(
        {"graded": make},
        says(script, render=one_renderer()),
        one_renderer(),
        Sampling(50),
        limits(**{**patient, **bounds}),
        seed=7,
        split="heldout/sampled",
        attempts=attempts,
        retries=retries,
    )


def tasks(*turns):
    return [Task(f"task-{number}", "graded", {"turns": count}) for number, count in enumerate(turns)]


def examined(kind, settings, chosen, **how):
    log = Log()
    batches, own = attempt_maker(kind, log, settings, **how)
    result = run(evaluate(own, chosen, 1.0))
    assert [environment.closed for environment in log.made] == [1] * len(log.made)
    return result, log, batches


def told(result):
    """Everything about attempts but their timing."""
    return [
        [
            (
                trajectory.status,
                trajectory.outcome,
                dict(trajectory.marks),
                [(t.prompt.tolist(), t.action.tolist(), t.reward, t.said, t.heard) for t in trajectory.turns],
            )
            for trajectory in (*group.trajectories, *group.failed)
        ]
        for group in result.groups
    ]


# ---------------------------------------------------------------- the same results, in other calls


def test_results_are_the_same_under_every_policy():
    chosen = tasks(1, 4, 2, 2, 5, 3, 1, 6)
    results = {name: examined(Graded, settings, chosen, attempts=3) for name, settings in POLICIES.items()}
    reference = told(results["per attempt"][0])
    assert len(reference) == 8
    assert {len(turns) for group in reference for _, _, _, turns in group} == {1, 2, 3, 4, 5, 6}
    assert len({outcome for group in reference for _, outcome, _, _ in group}) > 3
    for name, (result, log, _) in results.items():
        assert told(result) == reference, name
        assert sum(log.steps) == sum(task.data["turns"] for task in chosen) * 3
        assert sum(log.closes) == 24
    assert len({tuple(log.steps) for _, log, _ in results.values()}) == len(POLICIES)


def test_training_groups_are_the_same_too():
    groups = []
    for settings in POLICIES.values():
        _, own = attempt_maker(Graded, Log(), settings, validation=False, attempts=4)
        groups.append(run(own.group(tasks(3)[0], epoch=2)))
    assert [len(group.trajectories) for group in groups] == [4] * len(POLICIES)
    assert len({str(told(Result((group,), 1.0))) for group in groups}) == 1


def test_under_lockstep_there_are_as_many_rounds_as_the_longest_attempt_has_turns():
    turns = (1, 4, 2, 2, 7, 3)
    _, log, _ = examined(Graded, POLICIES["lockstep"], tasks(*turns), attempts=2)
    assert log.steps == [2 * sum(count > number for count in turns) for number in range(7)]
    assert log.closes == [12]


def test_rounds_in_parts_are_as_many():
    turns = (1, 4, 2, 2, 7, 3)

    async def work():
        log = Log()
        batches, own = attempt_maker(Graded, log, POLICIES["lockstep in parts"], attempts=2)
        await evaluate(own, tasks(*turns), 1.0)
        return log, batches.report()

    log, report = run(work())
    assert report["step/flush/everyone"] == 7
    assert report["step/calls"] == len(log.steps) == 4 * 4 + 2 * 3  # rounds of 12, 10, 6 and 4, and three of 2


def test_by_default_calls_are_few():
    chosen = tasks(*[4] * 64)
    _, alone, _ = examined(Graded, POLICIES["per attempt"], chosen)
    _, batched, _ = examined(Graded, POLICIES["adaptive"], chosen)
    assert len(alone.steps) == 256
    assert 4 * len(batched.steps) < len(alone.steps)
    assert 4 * len(batched.closes) < len(alone.closes) == 64


# ---------------------------------------------------------------- who is batched


class Alone:
    """An environment like any other."""

    async def open(self, task):
        return Reply(user("go"))

    async def step(self, message):
        return Reply(finished=True, outcome=1.0)

    async def close(self):
        return None


def test_an_environment_without_many_is_left_alone():
    batches = Batches(Alone, rule=Adaptive(), slots=1, call_seconds=None)
    made = Alone()
    assert batches.wrap(lambda: made, Lane())() is made
    assert batches.report() == {}
    assert not is_batchable(Alone)
    assert is_batchable(Graded)


def test_a_method_that_serves_one_environment_is_refused():
    class Wrong(Alone):
        async def step_many(self, environments, messages):
            return []

    with pytest.raises(ValueError, match="Wrong.step_many serves several environments; make it a classmethod"):
        is_batchable(Wrong)


class LateGrader(Alone):
    """Steps by itself and is graded together."""

    def __init__(self, log):
        self.log = log
        self.closed = 0
        log.made.append(self)

    def step(self, message):
        self.log.steps.append(threading.current_thread())
        return Reply(finished=True, reward=0.25)

    @classmethod
    def close_many(cls, environments):
        environments[0].log.closes.append(threading.current_thread())
        for environment in environments:
            environment.closed += 1
        return [None if place % 2 else Reply(outcome=1.0) for place in range(len(environments))]


def test_only_what_is_batchable_is_batched_and_plain_functions_run_in_threads():
    log = Log()
    batches, own = attempt_maker(
        LateGrader, log, BatchingConfig(policy="lockstep", slots=1), lambda *_: "hello", attempts=6
    )
    group = acting.run(own.group(tasks(1)[0], 0))
    assert [trajectory.total for trajectory in group.trajectories] == [1.25, 0.25] * 3
    assert len(log.closes) == 1
    assert len(log.steps) == 6
    assert threading.main_thread() not in log.steps + log.closes
    assert {name.partition("/")[0] for name in acting.run(reported(batches))} == {"close"}


async def reported(batches):
    return batches.report()


class Stepper(Alone):
    """Steps together and closes by itself, in ways that a subclass chooses."""

    answer: Any

    def __init__(self, log):
        self.log = log
        self.closed = 0
        log.made.append(self)

    async def close(self):
        self.closed += 1

    @classmethod
    async def step_many(cls, environments, messages):
        environments[0].log.steps.append(len(environments))
        return [cls.answer(place) for place in range(len(environments))]


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (KeyError("mine"), "KeyError: 'mine'"),
        (7, "Stepper.step_many must return a Reply, got int"),
        (None, "Stepper.step_many must return a Reply, got NoneType"),
        (SystemExit("out"), "SystemExit: out"),
    ],
)
def test_one_wrong_answer_fails_one_attempt(wrong, said, caplog):
    class Wrong(Stepper):
        @classmethod
        def answer(cls, place):
            return wrong if place == 1 else Reply(finished=True, outcome=1.0)

    step_many: Any = Wrong.step_many
    step_many.__func__.__qualname__ = "Stepper.step_many"
    result, log, _ = examined(Wrong, BatchingConfig(slots=1), tasks(*[1] * 5), script=lambda *_: "hello")
    assert log.steps == [5]
    assert [len(group.trajectories) for group in result.groups] == [1, 0, 1, 1, 1]
    assert result.groups[1].failed[0].status is Status.failed
    assert said in caplog.text


class Fragile(Stepper):
    """Has one environment that breaks every batch it is in."""

    @classmethod
    async def step_many(cls, environments, messages):
        environments[0].log.steps.append(len(environments))
        await asyncio.sleep(1)
        if any(environment is environment.log.made[2] for environment in environments):
            raise OSError("the judge is gone")
        return [Reply(finished=True, outcome=1.0) for _ in environments]


class Repeatable(Fragile):
    idempotent = True


@pytest.mark.parametrize(("kind", "steps", "succeeded"), [(Fragile, [5], 0), (Repeatable, [5, 1, 1, 1, 1, 1], 4)])
def test_a_broken_batch_is_asked_again_only_where_that_changes_nothing(kind, steps, succeeded):
    result, log, _ = examined(kind, BatchingConfig(slots=1), tasks(*[1] * 5), script=lambda *_: "hello")
    assert log.steps == steps
    assert result.num_successes == succeeded
    assert result.num_attempts == 5


def test_a_retried_attempt_has_a_fresh_environment():
    result, log, batches = examined(
        Fragile, BatchingConfig(slots=1), tasks(*[1] * 5), script=lambda *_: "hello", retries=1
    )
    assert result.num_successes == 5
    assert len(log.made) == 10
    assert batches.steps.live == 0


class Hanging(Stepper):
    """One environment of three never answers, and neither does the call that it is in."""

    @classmethod
    async def step_many(cls, environments, messages):
        environments[0].log.steps.append(len(environments))
        await asyncio.sleep(1e6 if environments[0].log.made[1] in environments else 1)
        return [Reply(finished=True, outcome=1.0) for _ in environments]


def test_a_deadline_ends_the_attempt_frees_the_slot_and_closes():
    bounds = {"call_seconds": 30.0}
    result, log, batches = examined(
        Hanging, BatchingConfig(slots=1), tasks(*[1] * 3), script=lambda *_: "x", retries=1, **bounds
    )
    assert result.num_successes == 3  # in their second attempts
    assert [environment.closed for environment in log.made] == [1] * 6
    assert (batches.steps.live, batches.steps.in_service, len(batches.steps.calls)) == (0, 0, 0)


def test_a_step_that_was_given_up_is_over_before_its_environment_closes():
    events = []

    class Slow(Stepper):
        async def close(self):
            events.append(("closed", asyncio.get_running_loop().time()))
            await super().close()

        @classmethod
        async def step_many(cls, environments, messages):
            await asyncio.sleep(8)
            events.append(("stepped", asyncio.get_running_loop().time()))
            return [Reply(finished=True) for _ in environments]

    async def work():
        batches, own = attempt_maker(Slow, Log(), BatchingConfig(slots=1))
        one, other = (own.environments["graded"]() for _ in range(2))
        for environment in (one, other):
            await environment.open(None)
        stepping = [asyncio.create_task(environment.step(None)) for environment in (one, other)]
        await asyncio.sleep(2)
        stepping[0].cancel()
        await one.close()
        await stepping[1]
        await other.close()
        assert batches.steps.live == 0

    run(work())
    assert events == [("stepped", 8), ("closed", 8), ("closed", 8)]


def test_an_environment_is_closed_though_its_caller_did_not_wait():
    log = Log()

    async def work():
        batches, own = attempt_maker(Graded, log, BatchingConfig(slots=1))
        environment = own.environments["graded"]()
        await environment.open(tasks(1)[0])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await environment.close()
        assert (log.made[0].closed, batches.closes.live) == (0, 1)
        await asyncio.sleep(5)
        assert (log.made[0].closed, batches.closes.live, batches.closing) == (1, 0, set())

    run(work())


@pytest.mark.parametrize("error", [SystemExit("out"), asyncio.CancelledError("gone"), GeneratorExit("gone")])
def test_whatever_close_raises_fails_the_attempt_and_nothing_else(error):
    class Bad(Stepper):
        async def close(self):
            await super().close()
            raise error

        @classmethod
        def answer(cls, place):
            return Reply(finished=True, outcome=1.0)

    result, _, _ = examined(Bad, BatchingConfig(), tasks(1, 1), script=lambda *_: "x")
    assert [group.failed[0].status for group in result.groups] == [Status.failed] * 2


@pytest.mark.parametrize(
    "make",
    [lambda own: own.group(tasks(5)[0], 0), lambda own: evaluate(own, tasks(5, 5, 5), 1.0)],
    ids=["group", "exam"],
)
def test_cancelling_closes_every_environment(make):
    """Though they close one call after another, and the first attempt is over long before the last."""
    log = Log()

    async def work():
        batches, own = attempt_maker(Graded, log, BatchingConfig(slots=1, max_batch=2), attempts=6)
        making = asyncio.create_task(make(own))
        await asyncio.sleep(7)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        return batches

    batches = run(work())
    assert len(log.made) >= 6
    assert [environment.closed for environment in log.made] == [1] * len(log.made)
    assert (batches.steps.live, batches.closes.live, batches.steps.queued) == (0, 0, 0)


# ---------------------------------------------------------------- training and validation together


def test_validation_shares_the_queue_and_goes_second():
    log = Log()
    order = []

    class Judge(Graded):
        @classmethod
        async def step_many(cls, environments, messages):
            order.append([environment.task.dataset for environment in environments])
            return await super().step_many(environments, messages)

    settings = BatchingConfig(slots=1, max_batch=4)
    batches = Batches(Judge, rule=rule_of(settings), slots=1, call_seconds=None)
    made = {
        validation: batches.wrap(lambda: Judge(log), lane_of(settings, validation=validation))
        for validation in (False, True)
    }

    async def attempt(validation, name):
        environment = made[validation]()
        await environment.open(Task(name, "validation" if validation else "training", {"turns": 1}))
        await environment.step(user("x")[0])
        await environment.close()

    async def work():
        validation = [attempt(True, f"v{number}") for number in range(6)]
        await asyncio.gather(*validation, *(attempt(False, f"t{number}") for number in range(5)))

    run(work())
    assert order == [["training"] * 4, ["training"] + ["validation"] * 3, ["validation"] * 3]


@pytest.mark.parametrize(
    ("settings", "validation", "lane"),
    [
        (BatchingConfig(), False, Lane(0, 0.0)),
        (BatchingConfig(), True, Lane(1, 0.0, max_wait_prices=0.5)),
        (BatchingConfig(max_wait=2.5), False, Lane(0, 2.5)),
        (BatchingConfig(max_wait=2.5), True, Lane(1, 2.5)),
    ],
)
def test_lanes_of_a_recipe(settings, validation, lane):
    assert lane_of(settings, validation=validation) == lane


def test_rules_of_a_recipe():
    assert rule_of(BatchingConfig()) == Adaptive(256)
    assert rule_of(BatchingConfig(max_batch=9)) == Adaptive(9)
    assert rule_of(BatchingConfig(policy="lockstep")) == Lockstep()
    assert rule_of(BatchingConfig(policy="per_attempt")) == Adaptive(1)


# ---------------------------------------------------------------- all of it at once


class Hostile(Graded):
    """Does everything that an environment can do wrong, as its task's seed will have it."""

    per_call, per_item = 0.5, 0.1
    idempotent = False

    async def open(self, task):
        self.random = Random(seed_of(task.data["seed"], len(self.log.made)))
        fate = self.random.random()
        if fate < 0.1:
            raise ValueError("cannot open")
        await asyncio.sleep(60 if fate < 0.15 else self.random.expovariate(2.0))
        return await super().open(task)

    @classmethod
    async def step_many(cls, environments, messages):
        fate = environments[0].random.random()
        if fate < 0.05:
            await asyncio.sleep(1000)
        if fate < 0.15:
            raise environments[0].random.choice([OSError("down"), SystemExit("out"), asyncio.CancelledError("gone")])
        answers = await super().step_many(environments, messages)
        for place, environment in enumerate(environments):
            if environment.random.random() < 0.1:
                answers[place] = environment.random.choice([ValueError("no"), None, "nonsense"])
        return answers[1:] if fate > 0.95 else answers

    @classmethod
    async def close_many(cls, environments):
        graded = [environment.grade() if hasattr(environment, "heard") else None for environment in environments]
        for environment in environments:
            environment.closed += not hasattr(environment, "heard")
        await asyncio.sleep(0.5)
        if environments[0].random.random() < 0.1:
            raise OSError("no grades today")
        return graded


def test_every_attempt_ends_and_every_environment_is_closed_once(caplog):
    caplog.set_level("ERROR")
    statuses, cancelled = [], 0
    for seed in range(500):
        random = Random(seed)
        log, settings = Log(), random.choice(list(POLICIES.values()))

        async def work(random=random, log=log, settings=settings, seed=seed):
            batches, own = attempt_maker(
                Hostile, log, settings, attempts=random.randint(1, 4), retries=random.randint(0, 1), call_seconds=20.0
            )
            task = Task("t", "graded", {"turns": random.randint(1, 3), "seed": seed})
            making = asyncio.create_task(own.group(task, 0))
            if random.random() < 0.2:
                asyncio.get_running_loop().call_later(random.expovariate(0.3), making.cancel)
            made = (await asyncio.gather(making, return_exceptions=True))[0]
            await asyncio.sleep(1000)  # what was given up comes to an end too
            for queue in (batches.steps, batches.closes):
                assert (queue.live, queue.queued, queue.in_service, len(queue.calls)) == (0, 0, 0, 0)
            assert not batches.closing
            return made

        made = run(work(), seed)
        if isinstance(made, BaseException):
            assert isinstance(made, asyncio.CancelledError)
            cancelled += 1
        else:
            statuses += [trajectory.status for trajectory in (*made.trajectories, *made.failed)]
        assert [environment.closed for environment in log.made] == [1] * len(log.made)
    assert cancelled > 20
    assert {Status.finished, Status.failed, Status.timed_out} <= set(statuses)
