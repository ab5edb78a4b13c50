"""Recipes written in Python."""

import copy
import pickle
from pathlib import Path

import pytest

import turnwise as tw
from support.paths import ROOT
from support.running import micro_recipe, mistake
from turnwise.api.recipe_tree import RecipeTree

QUICKSTART = ROOT / "recipes" / "quickstart.toml"


def test_keywords_tables_and_overrides_mean_the_same():
    tables = tw.Recipe(steps=3, env={"name": "hops"}, optimizer={"learning_rate": 1e-3, "adamw": {"clip_norm": 2.0}})
    overrides = tw.Recipe(
        "steps=3", "optimizer.learning_rate=1e-3", "optimizer.adamw.clip_norm=2", env={"name": "hops"}
    )
    dotted = tw.Recipe(
        steps=3, **{"optimizer.learning_rate": 1e-3, "optimizer.adamw.clip_norm": 2.0, "env.name": "hops"}
    )
    assert tables == overrides == dotted
    assert (tables.steps, tables.optimizer.adamw.clip_norm, tables.env[0].name) == (3, 2.0, "hops")


def test_a_file_is_read_as_the_command_line_reads_it(tmp_path):
    settings = micro_recipe(tmp_path)
    read = tw.Recipe.load(tmp_path / "micro.toml", out=settings.out)
    assert read.settings == settings
    assert tw.Recipe.load(QUICKSTART, "rollout.group_size=4", steps=5).rollout.group_size == 4


@pytest.mark.parametrize(
    ("keys", "override", "key"),
    [
        ({"stepz": 3}, "stepz=3", "stepz"),
        ({"optimizer": {"lerning_rate": 1.0}}, "optimizer.lerning_rate=1", "optimizer.lerning_rate"),
        ({"rollout": {"group_size": 0}}, "rollout.group_size=0", "rollout.group_size"),
        ({"loss": 3}, "loss=3", "loss"),
    ],
)
def test_a_mistake_is_the_line_of_the_command_line(keys, override, key, capsys):
    with pytest.raises(ValueError) as caught:
        tw.Recipe(**keys)
    said = mistake(capsys, "train", str(QUICKSTART), override)
    _, _, here = str(caught.value).partition("Recipe: ")
    assert "\n" not in here
    assert key in here
    assert here == said.partition(f"{QUICKSTART}: ")[2]


def test_changes_leave_the_recipe_alone_and_none_removes():
    recipe = tw.Recipe(steps=3, env={"name": "hops", "tasks": {"count": 8}}, credit={"name": "gae", "lam": 0.9})
    other = recipe.change(steps=4, env=None, credit={"name": "rloo"})
    assert (recipe.steps, other.steps) == (3, 4)
    assert recipe.env[0].name == "hops"
    assert "env" not in other.tree
    assert other.credit.arguments == {}  # the settings of the estimator before went with it
    assert recipe.change(**{"env.tasks.count": 9}).env[0].tasks == {"count": 9}
    assert recipe.change(**{"env.tasks": {"links": 1}}).env[0].tasks == {"count": 8, "links": 1}


def test_what_is_no_recipe_is_refused():
    with pytest.raises(ValueError, match='takes keywords and "key=value" strings, got int'):
        tw.Recipe(3)
    with pytest.raises(ValueError, match="steps is no table"):
        tw.Recipe(**{"steps": 3, "steps.more": 4})
    with pytest.raises(ValueError, match="no recipe at nowhere.toml"):
        tw.Recipe.load(Path("nowhere.toml"))


def test_a_recipe_is_a_value():
    recipe = tw.Recipe(steps=3, out=Path("runs/x"))
    assert recipe.out == "runs/x"
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe
    assert hash(recipe) == hash(tw.Recipe(out="runs/x", steps=3))
    assert repr(recipe) == "Recipe(steps=3, out='runs/x')"
    assert recipe != tw.Recipe(steps=4)
    assert RecipeTree.of(tw.Recipe(env={"name": "hops"}).settings) == tw.Recipe(env={"name": "hops"})
    with pytest.raises(AttributeError, match="stepz"):
        _ = recipe.stepz
