"""What people write who come from other libraries, and shorter ways to write a recipe."""

import re
from typing import Any

import pytest

from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.filters import FILTERS
from turnwise.credit.weighting import WEIGHTINGS
from turnwise.learn.losses import LOSSES
from turnwise.recipe.parse import apply_override, load_recipe, parse_recipe, section_at
from turnwise.recipe.spellings import KEYS, VALUES

NAMES: dict[str, Any] = {"credit": ESTIMATORS, "filter": FILTERS, "loss": LOSSES, "weighting": WEIGHTINGS}


def read(*overrides, **tree):
    tree = {"env": [{"name": "hops"}], **tree}
    for override in overrides:
        apply_override(tree, override)
    return parse_recipe(tree, "test")


def complaint(*overrides):
    with pytest.raises(ValueError, match="^test: ") as caught:
        read(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("word", KEYS)
def test_a_word_of_another_library_is_answered_with_our_key(word):
    ours = KEYS[word]
    if ours.startswith("no key"):
        assert f"{word} has {ours}" in complaint(f"{word}=1")
        return
    assert f"{word} is {ours} here" in complaint(f"{word}=1")
    for key in re.split(" and ", ours.partition(" (")[0]):
        *tables, name = key.split(".")
        if tables[:1] not in (["loss"], ["credit"]) or name == "name":  # whose other keys are arguments
            assert name in section_at(tables).model_fields, key


def test_words_below_tables_of_other_libraries_are_found_too():
    assert "actor_rollout_ref.actor.optim.lr is optimizer.learning_rate here" in complaint(
        "actor_rollout_ref.actor.optim.lr=1e-6"
    )
    assert "optimizer.lr is optimizer.learning_rate here" in complaint("optimizer.lr=1")
    assert "critic.optimizer.lr is critic.optimizer.learning_rate here" in complaint("critic.optimizer.lr=1")
    found = complaint("trainer.max_steps=3", "trainer.train_batch_size=8")
    assert "trainer.max_steps is steps here; trainer.train_batch_size is groups_per_step" in found
    assert "unknown key trainer" in complaint("trainer.colour=3", "trainer.max_steps=3")


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, names in VALUES.items() for name in names])
def test_a_name_of_another_library_is_answered_with_ours(table, name):
    assert name not in NAMES[table]
    found = complaint(f"{table}={name}")
    assert f'{table}.name = "{name}" does not exist; {VALUES[table][name]}' in found
    for key, value in re.findall(r"(\w+)=(\w+)", VALUES[table][name]):
        assert value in NAMES.get(key, value), found


def test_what_an_answer_says_can_be_written():
    dapo = read("loss.clip_high=0.28", "filter=dynamic_sampling", "weighting=token_mean")
    assert dapo.filter.name == "dynamic_sampling"
    assert dapo.loss.name == "ppo_clip"  # settings without a name are those of the default
    assert dapo.loss.arguments == {"clip_high": 0.28}


def test_a_value_given_to_a_table_is_its_name_or_its_main_key():
    assert read("credit=rloo").credit.name == "rloo"
    assert read("credit.norm_by_std=false", "credit=grpo").credit.arguments == {"norm_by_std": False}
    assert read("engine.max_num_seqs=3", "engine=vllm").engine.max_num_seqs == 3
    assert read("kl=0.1").kl.coefficient == 0.1
    assert read("lora=8").lora.rank == 8
    assert read("model=some/folder").model.path == "some/folder"
    assert read("env=guess").env[0].name == "guess"
    assert read("env.0=guess").env[0].name == "guess"
    assert read("rollout.failures.on_failure=drop").rollout.failures.on_failure.name == "drop"
    assert read("optimizer=muon").optimizer.name == "muon"
    assert "credit is a table" in complaint("credit=true")


def test_a_recipe_file_may_write_the_short_form_and_be_overridden(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text('env = "hops"\ncredit = "grpo"\nmodel = "tiny"\n')
    recipe = load_recipe(path, ["credit.norm_by_std=false", "model.hidden=32", "env.0.weight=2"])
    assert recipe.credit.arguments == {"norm_by_std": False}
    assert (recipe.model.hidden, recipe.env[0].weight) == (32, 2)


def test_a_list_may_be_written_as_words():
    assert read("trackers=wandb").trackers == ("wandb",)
    assert read("trackers=wandb,mlflow").trackers == ("wandb", "mlflow")
    assert read("lora.rank=8", "lora.targets=q_proj,v_proj").lora.targets == ("q_proj", "v_proj")
    assert "trackers is called" not in complaint("trackers=wanbd")
    assert "runs.trackers is called trackers now" in complaint("runs.trackers=wandb")


def test_an_empty_value_removes_a_key_so_that_the_default_holds(tmp_path):
    path = tmp_path / "sized.toml"
    path.write_text('[[env]]\nname = "hops"\n[[env]]\nname = "guess"\n[model]\nhidden = 32\nlayers = 2\n')
    recipe = load_recipe(path, ["model.hidden=", "steps=", "env.1="])
    assert (recipe.model.hidden, recipe.model.layers, recipe.steps) == (128, 2, 100)
    assert [entry.name for entry in recipe.env] == ["hops"]
    with pytest.raises(ValueError, match="remove them \\(on the command line: model.hidden= model.layers="):
        load_recipe(path, ["model=some/folder"])
    assert load_recipe(path, ["model=some/folder", "model.hidden=", "model.layers="]).model.path == "some/folder"
    assert load_recipe(path, ["model="]).model.layers == 4
