"""Environments given as classes, and their names in a recipe."""

from functools import partial

import pytest

import turnwise as tw
from support.sessions import make_echo
from turnwise.api.given_environment import named
from turnwise.assemble.checks import check
from turnwise.assemble.environments import environment_class, environment_makers
from turnwise.envs.hops import Hops
from turnwise.envs.live import lent

Echo = make_echo()


def names(found):
    return [entry.name for entry in found.recipe.env]


def test_a_class_of_a_module_has_the_name_that_others_import():
    found = named(tw.Recipe(), Hops)
    assert names(found) == ["turnwise.envs.hops:Hops"]
    assert found.live == {}
    assert found.recipe.out == "runs/Hops-0"


def test_a_class_of_a_session_has_a_name_of_its_own():
    found = named(tw.Recipe(env={"tasks": {"count": 4}, "settings": {"price": 1}}), Echo)
    assert names(found) == ["live:Echo"]
    assert found.live == {"live:Echo": Echo}
    assert found.recipe.env[0].label == "Echo"
    assert found.recipe.env[0].tasks == {"count": 4}
    with lent(found.live):
        assert environment_class("live:Echo") is Echo
        assert vars(environment_makers(found.recipe)["Echo"]()) == {"price": 1}


def test_a_function_makes_environments():
    found = named(tw.Recipe(env={"settings": {"price": 2.0}}), partial(Echo))
    with lent(found.live):
        [(label, make)] = environment_makers(found.recipe).items()
        assert (label, vars(make()), isinstance(make(), Echo)) == ("Echo", {"price": 2.0}, True)
        assert environment_class("live:Echo").tasks("train", 0, 3)[2].id == "train-2"
    with pytest.raises(ValueError, match="env.settings.prize: .* takes no such setting; did you mean price"):
        named(tw.Recipe(env={"settings": {"prize": 2.0}}), partial(Echo))


def test_several_are_given_by_dataset():
    found = named(tw.Recipe(env=[{"dataset": "one", "weight": 2}]), {"one": Echo, "two": Hops})
    assert names(found) == ["live:one", "turnwise.envs.hops:Hops"]
    assert [(entry.label, entry.weight) for entry in found.recipe.env] == [("one", 2), ("two", 1)]


@pytest.mark.parametrize(
    ("recipe", "environment", "said"),
    [
        ({}, None, "the recipe names no environment; give a class with environment="),
        ({"env": {"name": "hops"}}, Echo, 'names env.name = "hops", and environment gives "live:Echo"; remove one'),
        ({"env": [{"dataset": "a"}, {"dataset": "b"}]}, Echo, "the recipe has 2 environments; give environment={"),
        ({}, 3, "environment is a class, a function that makes one or a name, got int"),
    ],
)
def test_what_cannot_be_meant_is_refused(recipe, environment, said):
    with pytest.raises(ValueError) as caught:
        named(tw.Recipe(**recipe), environment)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"isolation": {"enabled": True}},
            "env.isolation.enabled has other processes import the environment, and Echo",
        ),
        ({"settings": {"prize": 1}}, "env.settings.prize: live:Echo takes no such setting; did you mean price?"),
    ],
)
def test_what_a_class_of_a_session_cannot_do_is_refused(keys, said):
    found = named(tw.Recipe(env=keys), Echo)
    with lent(found.live), pytest.raises(ValueError) as caught:
        check(found.recipe)
    assert said in str(caught.value)


def test_actors_cannot_have_a_class_of_a_session():
    recipe = tw.Recipe(env={"concurrency": {"actors": 1}}, cluster={"placement": "colocated"})
    found = named(recipe, Echo)
    with lent(found.live), pytest.raises(ValueError, match="env.concurrency.actors has other processes import"):
        environment_makers(found.recipe)


def test_nobody_finds_a_class_that_is_not_lent():
    with pytest.raises(ValueError, match='"live:Echo" is a class of a Python session; go on in Python'):
        environment_class("live:Echo")


def test_a_class_without_the_methods_is_refused():
    class Half:
        def open(self, task):
            return tw.Reply()

    found = named(tw.Recipe(), Half)
    with lent(found.live), pytest.raises(ValueError, match="Half needs a method step"):
        environment_makers(found.recipe)
