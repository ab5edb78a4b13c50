"""Recipes and runs with environments whose calls are put together."""

import json
import re
from typing import Any

import pytest

from support.acting import limits, renderer, run, says
from support.assembling import environments_for
from support.paths import DOCS
from support.running import micro_recipe, train
from turnwise.assemble.checks import check
from turnwise.assemble.environments import tasks_of
from turnwise.assemble.provenance import fingerprint
from turnwise.engines.base import Sampling
from turnwise.envs.hops import Hops
from turnwise.evaluation.result import evaluate
from turnwise.recipe.parse import load_recipe, parse_recipe
from turnwise.rollout.batching.flush import Adaptive, Lockstep
from turnwise.rollout.group import AttemptMaker


class HopsTogether(Hops):
    """The game of lookups, many at once."""

    @classmethod
    async def step_many(cls, environments, messages):
        return [await environment.step(message) for environment, message in zip(environments, messages, strict=True)]

    @classmethod
    def close_many(cls, environments):
        return [None for _ in environments]


class MethodOfOne(Hops):
    async def step_many(self, environments, messages):
        return []


TOGETHER = f"{__name__}:HopsTogether"


def recipe(name=TOGETHER, **batching):
    return parse_recipe({"env": [{"name": name, "dataset": "hops", "batching": batching}]}, "here")


def test_settings_that_nothing_would_use_are_refused():
    check(recipe("hops"))
    with pytest.raises(ValueError, match="env.batching.slots would be ignored: hops has no step_many or close_many"):
        check(recipe("hops", slots=2))
    check(recipe(slots=2))
    with pytest.raises(ValueError, match="make it a classmethod"):
        check(recipe(f"{__name__}:MethodOfOne"))


@pytest.mark.parametrize(
    ("batching", "said"),
    [
        ({"max_batch": 3, "policy": "lockstep"}, 'max_batch is ignored with policy = "lockstep"'),
        ({"max_wait": 3.0, "policy": "per_attempt"}, 'max_wait is ignored with policy = "per_attempt"'),
        ({"max_wait": "never"}, 'env.0.batching.max_wait: write seconds, 0 or more, or "auto"'),
        ({"max_wait": -1}, "write seconds, 0 or more"),
        ({"max_wait": float("inf")}, "write seconds, 0 or more"),
        ({"max_wait": True}, "write seconds, 0 or more"),
        ({"slots": 0}, "greater than or equal to 1"),
        ({"slot": 1}, "did you mean slots"),
    ],
)
def test_wrong_settings_are_explained(batching, said):
    with pytest.raises(ValueError, match=said):
        recipe(**batching)


def test_a_recipe_makes_one_queue_for_training_and_validation():
    own: Any = environments_for(recipe(slots=3, policy="lockstep")).datasets["hops"].host
    assert (own.steps.slots, own.steps.rule, own.closes.rule) == (3, Lockstep(), Lockstep())
    given = recipe(max_batch=9, max_wait=1.5)
    environments = environments_for(given)
    training: Any = environments.training()["hops"]()
    validation: Any = environments.validation()["hops"]()
    host: Any = environments.datasets["hops"].host
    assert host.steps.rule == Adaptive(9)
    assert training.batches is validation.batches is host
    assert (training.lane.rank, validation.lane.rank) == (0, 1)
    assert isinstance(training.environment, HopsTogether)


def test_other_environments_stay_as_they_are():
    given = recipe("hops")
    made = environments_for(given).validation()["hops"]()
    assert type(made) is Hops


def test_batching_does_not_change_the_warm_start():
    assert fingerprint(recipe()) == fingerprint(recipe(slots=9, policy="lockstep"))
    assert fingerprint(recipe()) != fingerprint(recipe("hops"))


def test_a_run_logs_how_calls_were_put_together(tmp_path):
    name = [f'env.0.name="{TOGETHER}"', 'env.0.dataset="hops"', "env.0.batching.slots=2", "steps=2", "sft.updates=1"]
    train(micro_recipe(tmp_path, *name))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["batch/hops/close/calls"] > 0
        assert 0 < line["batch/hops/step/calls"] <= line["batch/hops/step/items"]
        assert line["batch/hops/step/failed_calls"] == 0
    # Before training there are 16 held-out tasks, sampled and greedily; then a step's 4 groups of 4.
    assert [line["batch/hops/close/items"] for line in lines] == [32, 16, 48]
    assert lines[1]["batch/hops/step/items"] == lines[1]["turn/count"]


def test_the_environment_of_the_docs_is_batched(tmp_path, monkeypatch):
    page = (DOCS / "explanation" / "batching.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (settings,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "riddle.py").write_text(code)
    (tmp_path / "riddle.toml").write_text(settings)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = load_recipe(tmp_path / "riddle.toml")
    check(given)
    environments = environments_for(given)
    tasks = tasks_of(given, "heldout", 20)["Riddle"]
    words = iter([task.data["word"][::-1] for task in tasks])
    makers = environments.validation()
    engine = says(lambda *_: next(words))
    practice = AttemptMaker(makers, engine, renderer(), Sampling(20), limits(), seed=0, split="heldout", attempts=1)

    async def work():
        return await evaluate(practice, tasks, 1.0), environments.datasets["Riddle"].host.report()

    result, report = run(work())
    assert result.success == 1.0
    assert report["step/items"] == 20
    assert report["step/calls"] < 20
