"""Recipes as dotted keys."""

import pytest

from turnwise.inspect.flat_recipe import ABSENT, changed_from_defaults, differing, flat_recipe, toml_text
from turnwise.recipe.schema import Recipe


def whole(**changes):
    return Recipe.model_validate({"env": [{"name": "hops"}], **changes}).model_dump(mode="json")


def test_keys_are_those_of_overrides():
    tree = {"steps": 2, "env": [{"name": "hops", "tasks": {"links": [1, 2]}}], "lora": {"targets": []}, "kl": {}}
    assert flat_recipe(tree) == {
        "steps": 2,
        "env.0.name": "hops",
        "env.0.tasks.links": [1, 2],
        "lora.targets": [],
        "kl": {},
    }


def test_only_what_is_not_a_default_has_changed():
    assert changed_from_defaults(whole(out="x")) == {"env.0.name": ("hops", ABSENT)}
    found = changed_from_defaults(whole(steps=3, rollout={"max_turns": 5}, loss={"name": "ppo_clip", "clip_low": 0.1}))
    assert found.keys() == {"env.0.name", "steps", "rollout.max_turns", "loss.clip_low"}
    assert found["steps"] == (3, 100)
    assert found["loss.clip_low"] == (0.1, ABSENT)


def test_a_key_of_another_version_is_shown():
    assert changed_from_defaults({**whole(), "gone": 1})["gone"] == (1, ABSENT)


def test_recipes_differ_in_what_they_do_not_agree_on():
    one, two = whole(out="a", steps=1), whole(out="b", steps=2, credit={"name": "grpo", "normalise": True})
    assert differing([one, two]) == {"steps": (1, 2), "credit.normalise": (ABSENT, True)}
    assert differing([one, one]) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (0.0007, "0.0007"), ("a", '"a"'), ([1, "b"], '[1, "b"]'), ({"a": 1}, "{a = 1}"), (ABSENT, "-")],
)
def test_values_are_written_as_in_a_recipe(value, text):
    assert toml_text(value) == text
