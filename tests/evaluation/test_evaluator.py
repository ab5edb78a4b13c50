"""Evaluations that are waited for, that go on by themselves, fail or are given up."""

import asyncio
from functools import partial

import pytest

from support.acting import hang, renderer, run, says, until, user
from turnwise.assemble.attempts import evaluation_attempts
from turnwise.assemble.environments import endpoint_of, environments_of, tasks_of
from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.evaluation.evaluator import Evaluator
from turnwise.recipe.parse import parse_recipe
from turnwise.runs.archive import read_step
from turnwise.runs.evaluations import evaluated


class Door:
    """Opens when told to; counts who is inside."""

    inside = 0
    opened = asyncio.Event()

    @staticmethod
    def tasks(split, seed, count=6):
        return draw_tasks("door", split, count, seed, lambda random: {"n": random.getrandbits(30)})

    async def open(self, task):
        Door.inside += 1
        return Reply(user("go"))

    async def step(self, message):
        await Door.opened.wait()
        return Reply(finished=True, outcome=float(message.content == "right"))

    async def close(self):
        Door.inside -= 1


@pytest.fixture(autouse=True)
def closed_door():
    Door.inside, Door.opened = 0, asyncio.Event()


RECIPE = parse_recipe({"env": [{"name": f"{__name__}:Door", "dataset": "door"}], "evaluation": {"attempts": 2}}, "here")
TASKS = tasks_of(RECIPE, "heldout")["door"]


def evaluator(folder, text="right", recipe=RECIPE, **settings):
    engine, speak = says(text), renderer()
    environments = environments_of(recipe, endpoint_of(recipe))
    attempts = partial(evaluation_attempts, recipe, environments, engine, speak)
    return Evaluator(engine, attempts, folder, success_at=1.0, decode=speak.decode, **settings)


def test_an_evaluation_is_of_the_weights_it_is_given_and_left_on_disk(tmp_path):
    Door.opened.set()

    async def work():
        own = evaluator(tmp_path)
        return [await own.evaluate(7, TASKS, greedy=greedy, weights={}) for greedy in (False, True)]

    sampled, greedy = run(work())
    assert (sampled.version, sampled.kind, sampled.result.num_attempts) == (7, "sampled", 12)
    assert (greedy.version, greedy.kind, greedy.result.num_attempts) == (7, "greedy", 6)
    assert sampled.result.versions == greedy.result.versions == {7}
    assert sampled.metrics["eval/sampled/version"] == 7
    assert greedy.metrics["eval/greedy/success"] == 1.0
    assert evaluated(tmp_path) == [(7, "greedy"), (7, "sampled")]
    assert [record.group.task for record in read_step(sampled.path)] == TASKS


def test_both_kinds_are_made_at_once(tmp_path):
    async def work():
        own = evaluator(tmp_path)
        calls = []
        load, forget = own.engine.load, own.engine.forget
        own.engine.load = lambda *given: calls.append("load") or load(*given)
        own.engine.forget = lambda: calls.append("forget") or forget()
        making = asyncio.ensure_future(own.evaluate_together(7, TASKS, (False, True), weights={}))
        await until(lambda: Door.inside == 12 + 6)  # all of them wait at the door
        Door.opened.set()
        return await making, calls

    (sampled, greedy), calls = run(work())
    assert calls == ["load", "forget"]
    assert (sampled.kind, sampled.result.num_attempts) == ("sampled", 12)
    assert (greedy.kind, greedy.result.num_attempts) == ("greedy", 6)
    assert evaluated(tmp_path) == [(7, "greedy"), (7, "sampled")]


def test_an_evaluation_that_was_sampled_by_other_weights_is_refused(tmp_path):
    Door.opened.set()
    own = evaluator(tmp_path)
    own.engine.version = 6
    with pytest.raises(AssertionError, match=r"an evaluation of version 7 was sampled by \[6\]"):
        run(own.evaluate(7, TASKS, greedy=True))
    assert evaluated(tmp_path) == []


def test_an_evaluation_that_was_begun_goes_on_by_itself_until_it_is_collected(tmp_path):
    async def work():
        own = evaluator(tmp_path)
        assert await own.collect(wait=True) is None
        await own.begin(3, TASKS, {})
        await until(lambda: Door.inside == 12)
        assert await own.collect(wait=False) is None
        with pytest.raises(AssertionError, match="one evaluation at a time"):
            await own.begin(4, TASKS, {})
        Door.opened.set()
        evaluation = await own.collect(wait=True)
        assert await own.collect(wait=True) is None
        await own.begin(4, TASKS[:1], {})
        later = await own.collect(wait=True)
        return evaluation, later

    evaluation, later = run(work())
    assert (evaluation.version, evaluation.result.versions, evaluation.result.num_successes) == (3, {3}, 12)
    assert (later.version, later.result.versions) == (4, {4})
    assert Door.inside == 0


def test_one_that_is_given_up_closes_its_environments_and_leaves_nothing(tmp_path):
    async def work():
        own = evaluator(tmp_path)
        await own.begin(3, TASKS, {})
        await until(lambda: Door.inside == 12)
        await own.stop()

    run(work(), seconds=5)
    assert Door.inside == 0
    assert evaluated(tmp_path) == []


def test_cancelling_the_wait_for_an_evaluation_cancels_it(tmp_path):
    async def work():
        own = evaluator(tmp_path)
        await own.begin(3, TASKS, {})
        waiting = asyncio.create_task(own.collect(wait=True))
        await until(lambda: Door.inside == 12)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert Door.inside == 0
        await own.stop()

    run(work(), seconds=5)


def test_an_error_inside_is_raised_where_it_is_collected(tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("turnwise.evaluation.evaluator.write_evaluation", full)
    Door.opened.set()

    async def work(ask):
        own = evaluator(tmp_path)
        await own.begin(3, TASKS, {})
        await until(own.under_way.done)
        try:
            if ask:
                await own.collect(wait=False)
        finally:
            await own.stop()

    with pytest.raises(OSError, match="No space left"):
        run(work(ask=True))
    caplog.clear()
    run(work(ask=False))  # nobody asked for it any more: it is at least said
    assert "evaluation of version 3 failed" in caplog.text


def test_environments_that_hang_do_not_hang_an_evaluation(tmp_path, monkeypatch):
    async def never(self, message):
        await hang()

    monkeypatch.setattr(Door, "step", never)
    hasty = parse_recipe(
        RECIPE.model_dump() | {"rollout": {"limits": {"call_seconds": 0.05}, "failures": {"retries": 0}}}, "here"
    )
    own = evaluator(tmp_path, recipe=hasty, stops_when_hopeless=False)
    evaluation = run(own.evaluate(0, TASKS, greedy=True), seconds=10)
    assert evaluation.metrics["eval/greedy/status/timed_out"] == 6
    assert evaluation.metrics["eval/greedy/success"] == 0.0


def test_prefixes_that_an_evaluation_computed_are_forgotten(tmp_path):
    """A run that resumes after it has not computed them: with them, training would go on differently."""
    Door.opened.set()
    own = evaluator(tmp_path)
    events, generate = [], own.engine.generate

    async def noted(*arguments, **named):
        completion = await generate(*arguments, **named)
        events.append("generate")
        return completion

    async def forget():
        events.append("forget")

    own.engine.generate, own.engine.forget = noted, forget
    run(own.evaluate(7, TASKS, greedy=True, weights={}))
    assert events == ["generate"] * len(TASKS) + ["forget"]
