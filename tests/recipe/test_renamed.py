import json

import pytest

from support.running import micro_recipe, train
from turnwise.inspect.recorded_run import RecordedRun
from turnwise.recipe.parse import apply_override, parse_recipe, section_at
from turnwise.recipe.renamed import RENAMED, RENAMED_VALUES
from turnwise.runs.checksums import NAME as CHECKSUMS
from turnwise.runs.checksums import checksum_line
from turnwise.runs.folder import RunFolder
from turnwise.runs.trust import recipe_of_run


def complaint(*overrides):
    """The line that refuses a recipe with some overrides."""
    tree = {"env": [{"name": "hops"}]}
    for override in overrides:
        apply_override(tree, override)
    with pytest.raises(ValueError, match="^test: ") as caught:
        parse_recipe(tree, "test")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def is_key(name):
    *tables, key = name.split(".")
    try:
        return key in section_at(tables).model_fields
    except (KeyError, StopIteration):
        return False


@pytest.mark.parametrize("old", RENAMED)
def test_a_key_of_old_is_named_as_it_is_called_now(old):
    key = old.replace("env.", "env.0.")
    assert complaint(f"{key}=1") == f"test: {key} is called {RENAMED[old]} now; rename it"


def test_new_names_are_keys_and_old_names_are_not():
    assert [new for new in RENAMED.values() if not is_key(new)] == []
    assert [old for old in RENAMED if is_key(old)] == []


def test_several_old_keys_are_one_phrase_beside_other_mistakes():
    found = complaint("runs.checkpoints=3", "runs.project=x", "order=finished", "steps=0")
    assert found.startswith("test: steps: ")
    assert found.endswith(
        "; runs.checkpoints is called checkpoints.keep now, runs.project is called tracking.project now, "
        "order is called schedule.order now; rename them"
    )


def test_an_unknown_key_of_a_table_of_old_is_unknown():
    assert "unknown key runs" in complaint("runs.colour=1")


@pytest.mark.parametrize(
    ("path", "old", "new"), [(path, *pair) for path, names in RENAMED_VALUES.items() for pair in names.items()]
)
def test_a_value_of_old_is_named_as_it_is_called_now(path, old, new):
    key = ".".join(path)
    assert complaint(f"{key}={old}") == f'test: {key} = "{old}" is called "{new}" now; rename it'


def test_a_recorded_recipe_shows_a_few_of_many_old_keys():
    tree = {"env": [{"name": "hops"}], "order": "started", "stale": "x", "gap_limit": 0, "runs": {"project": "a"}}
    with pytest.raises(ValueError, match="^config.json: ") as caught:
        parse_recipe(tree, "config.json", is_recorded=True)
    assert str(caught.value) == (
        "config.json: order is called schedule.order now, stale is called schedule.stale now, "
        "gap_limit is called guards.max_logprob_gap now, and 1 more; an earlier version of "
        "turnwise made this run: use that version, or start a new run with the new names"
    )


def test_a_run_of_an_earlier_version_names_the_new_keys_and_what_to_do(tmp_path):
    """A checksum protects config.json, so that nobody is asked to rename anything in it."""
    recipe = micro_recipe(tmp_path, "steps=1")
    train(recipe)
    folder = RunFolder.open(recipe.out)
    tree = folder.read_config()
    tree["order"] = tree.pop("schedule")["order"]
    tree["env"][0]["isolated"] = tree["env"][0].pop("isolation")["enabled"]
    text = json.dumps(tree)
    folder.config.write_text(text)
    (folder.path / CHECKSUMS).write_text(checksum_line(text.encode(), folder.config.name))
    wanted = (
        f"{folder.config}: env.0.isolated is called env.isolation.enabled now, order is called schedule.order now; "
        "an earlier version of turnwise made this run: use that version, or start a new run with the new names"
    )
    for read in (recipe_of_run, lambda folder: RecordedRun.open(folder.path)):
        with pytest.raises(ValueError, match="^.+$") as caught:
            read(folder)
        assert str(caught.value) == wanted
