import os

import pytest

from support.acting import attempted, says
from support.acting import run as run_it
from support.wild import Wild
from turnwise.assemble.environments import environment_makers, tasks_of
from turnwise.envs.capabilities import can_demonstrate
from turnwise.envs.isolation.user_environment import isolated_class
from turnwise.recipe.arguments import check_arguments
from turnwise.recipe.parse import parse_recipe
from turnwise.rollout.concurrently import all_of
from turnwise.types import Status

KIND = isolated_class("support.wild:Wild", Wild, 256)


class Together(Wild):
    @classmethod
    def step_many(cls, environments, messages):
        return []


def run(work):
    return run_it(work, 90)


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("leave", Status.failed),
        ("stop", Status.failed),
        ("quit", Status.failed),
        ("interrupt", Status.failed),
        ("crash", Status.failed),
        ("bomb", Status.failed),
        ("hang", Status.timed_out),
        ("sleep", Status.timed_out),
    ],
)
def test_whatever_an_isolated_environment_does_costs_its_attempt_and_no_other(word, status):
    async def play():
        seconds = 1.0 if status == Status.timed_out else 60.0
        bad = attempted(KIND, says(word), call_seconds=seconds, attempt_seconds=60.0)
        fine = (attempted(KIND, says("fine"), call_seconds=60.0, attempt_seconds=60.0) for _ in range(2))
        await attempted(KIND, says("fine"), call_seconds=60.0, attempt_seconds=60.0)  # which has the library imported
        return await all_of([bad, *fine])

    bad, *fine = run(play())
    assert bad.status == status
    assert [made.status for made in fine] == [Status.finished] * 2
    pids = {made.turns[0].heard[0].content for made in fine}
    assert len(pids) == 2
    assert f"on {os.getpid()}" not in pids


def recipe(**entry):
    return parse_recipe({"env": [{"name": "support.wild:Wild", **entry}]}, "test")


def test_one_word_in_a_recipe_isolates_an_environment():
    asked = recipe(isolation={"enabled": True}, settings={"greeting": "hello"}, tasks={"count": 2})
    make = environment_makers(asked)["Wild"]
    made = run(attempted(make, says("fine"), call_seconds=60.0, attempt_seconds=60.0))
    assert made.status == Status.finished
    assert made.turns[0].heard[0].content != f"on {os.getpid()}"
    assert len(tasks_of(asked, "train")["Wild"]) == 2
    assert can_demonstrate(make())
    plain = environment_makers(recipe())["Wild"]
    assert run(attempted(plain, says("fine"))).turns[0].heard[0].content == f"on {os.getpid()}"


def test_settings_are_those_of_the_environment_itself():
    with pytest.raises(ValueError, match="greting"):
        check_arguments("support.wild:Wild", "env.settings", KIND, {"greting": "x"})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"isolation": {"memory": 100}}, "memory is ignored without enabled"),
        (
            {"isolation": {"enabled": True}, "concurrency": {"actors": 2}},
            "isolation.enabled is ignored with concurrency.actors",
        ),
        (
            {"isolation": {"enabled": True}, "name": "test_own:Together"},
            "which env.isolation.enabled prevents",
        ),
        ({"isolation": {"enabled": True}, "name": "textarena:GuessTheNumber-v0"}, "already runs in separate processes"),
    ],
)
def test_isolation_that_would_be_ignored_is_refused(entry, message, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "test_own", __import__("sys").modules[__name__])
    with pytest.raises(ValueError, match=message):
        environment_makers(recipe(**entry))
