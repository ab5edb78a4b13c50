import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from support.making import few, make_group, make_model
from support.paths import RECIPES
from turnwise.recipe.arguments import check_arguments, choose, suggest
from turnwise.recipe.environment import EnvironmentConfig
from turnwise.recipe.parse import apply_override, load_recipe, parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.recipe.section import Choice, Section

SMALL = """
steps = 3
[[env]]
name = "hops"
[[env]]
name = "guess"
weight = 0.5
[env.settings]
guesses = 4
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def complaint(call, *arguments):
    """The message of the ValueError a call raises, which has to be one line."""
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        call(*arguments)
    assert type(caught.value) is ValueError, "a pydantic error would print many lines"
    message = str(caught.value)
    assert "\n" not in message
    return message


def parse(**tree):
    return parse_recipe({"env": [{"name": "hops"}], **tree}, "test.toml")


# ---------------------------------------------------------------- reading


def test_the_recipes_of_the_repository_load():
    paths = sorted(RECIPES.glob("*.toml"))
    assert paths
    for path in paths:
        assert load_recipe(path).env


def test_a_file_becomes_a_recipe(small):
    recipe = load_recipe(small)
    assert recipe.steps == 3
    assert [(entry.name, entry.weight, entry.settings) for entry in recipe.env] == [
        ("hops", 1.0, {}),
        ("guess", 0.5, {"guesses": 4}),
    ]


def test_out_is_named_after_recipe_and_seed(small):
    assert load_recipe(small).out == "runs/small-0"
    assert load_recipe(small, ["seed=7"]).out == "runs/small-7"
    assert load_recipe(small, ["out=here/{seed}", "seed=7"]).out == "here/7"


def test_a_single_environment_may_be_a_table():
    assert [entry.name for entry in parse(env={"name": "guess"}).env] == ["guess"]


def test_a_missing_file_is_one_line(tmp_path):
    path = tmp_path / "none.toml"
    assert complaint(load_recipe, path) == f"no recipe at {path}; turnwise recipes lists those that come with turnwise"


def test_a_folder_is_one_line(tmp_path):
    assert "cannot read the recipe" in complaint(load_recipe, tmp_path)


@pytest.mark.parametrize("text", [b"steps = ", b"[env\n", b"steps = 1\nsteps = 2\n", b"out = '\xff\xfe'\n"])
def test_broken_toml_is_one_line_that_names_the_file(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_bytes(text)
    message = complaint(load_recipe, path)
    assert message.startswith(f"{path} is not valid TOML: ")


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"stepz": 3}, "unknown key stepz; did you mean steps?"),
        ({"rollout": {"max_turn": 3}}, "unknown key rollout.max_turn; did you mean max_turns?"),
        ({"env": [{"name": "hops"}, {"name": "guess", "wieght": 1}]}, "unknown key env.1.wieght; did you mean weight?"),
        ({"sft": {"optimizer": {"warmpu": 1}}}, "unknown key sft.optimizer.warmpu; did you mean warmup?"),
        ({"sampling": {"top_p": 0.9}}, "unknown key sampling.top_p; known here: temperature"),
        ({"steps": "many"}, "unable to parse string as an integer (got 'many')"),
        ({"steps": 1.5}, "steps: Input should be a valid integer, got a number with a fractional part (got 1.5)"),
        ({"rollout": 3}, "rollout is a table; write its keys below [rollout] (got 3)"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1 (got 0)"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate: Input should be a finite number"),
        ({"optimizer": {"schedule": "cubic"}}, "optimizer.schedule: Input should be 'constant', 'linear' or 'cosine'"),
        ({"env": []}, "env: "),
        ({"env": [{"name": "hops"}, {"name": "hops"}]}, 'two environments are called "hops"'),
        ({"groups_per_step": 8, "groups_per_update": 3}, "8 is not a multiple of groups_per_update = 3"),
        (
            {"engine": {"memory": {"max_model_len": 10}}},
            "engine.memory.max_model_len = 10 is shorter than rollout.max_trajectory_tokens = 4608",
        ),
        (
            {"max_tokens_per_microbatch": 4000, "layout": "packed"},
            "max_tokens_per_microbatch = 4000 cannot hold a turn of rollout.max_trajectory_tokens = 4608",
        ),
        ({"rollout": {"group_size": 1}}, "failures.min_attempts = 2 can never be met with group_size = 1"),
        ({"rollout": {"max_prompt_tokens": 9, "max_trajectory_tokens": 9}}, "must leave room for an action"),
        ({"model": {"path": "models/x", "hidden": 64}}, "hidden and layers size the tiny model only"),
        ({"sft": {"data": "x.jsonl", "noise": 0.1}}, "noise and demonstrations apply to demonstrating environments"),
        (
            {"schedule": {"overlap_evaluations": True}, "evaluation": {"every": 0}},
            "schedule.overlap_evaluations is ignored with evaluation.every = 0",
        ),
        (
            {"schedule": {"overlap_evaluations": True}, "evaluation": {"every": 5}, "steps": 5},
            "schedule.overlap_evaluations is ignored with evaluation.every = 5: no evaluation is due before the last",
        ),
    ],
)
def test_a_mistake_is_one_line_with_key_and_remedy(tree, message):
    found = complaint(lambda: parse(**tree))
    assert found.startswith("test.toml: ")
    assert message in found


def test_an_environment_is_needed():
    assert complaint(parse_recipe, {}, "test.toml") == "test.toml: env is missing; add it"


def test_all_mistakes_are_told_at_once():
    found = complaint(lambda: parse(stepz=1, seed=-1, rollout={"group_sise": 2}))
    assert all(part in found for part in ("did you mean steps?", "seed: ", "did you mean group_size?"))


@pytest.mark.parametrize("value", [5, ["runs"], True])
def test_out_must_be_a_string(small, value):
    small.write_text(f"out = {str(value).lower() if value is True else value}\n" + SMALL)
    with pytest.raises(ValueError, match="out: "):
        load_recipe(small)


@few
@given(st.sampled_from(sorted(Recipe.model_fields)), st.data())
def test_a_slip_of_the_finger_finds_the_name_again(name, data):
    place = data.draw(st.integers(0, len(name) - 1))
    slip = name[:place] + "_" + name[place + 1 :]
    if len(name) > 3 and slip not in Recipe.model_fields:
        assert suggest(slip, Recipe.model_fields).startswith("; did you mean ")


def test_without_a_near_name_all_are_listed():
    assert suggest("zzz", ["beta", "alpha"]) == "; known here: alpha, beta"
    assert suggest("zzz", []) == "; known here: none"


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "where", "value"),
    [
        ("steps=7", lambda r: r.steps, 7),
        (" steps = 7 ", lambda r: r.steps, 7),
        ("optimizer.learning_rate=1e-3", lambda r: r.optimizer.learning_rate, 1e-3),
        ("sft.optimizer.warmup=5", lambda r: r.sft.optimizer.warmup, 5),
        ("env.0.weight=2", lambda r: [e.weight for e in r.env], [2.0, 0.5]),
        ("env.1.settings.guesses=9", lambda r: r.env[1].settings, {"guesses": 9}),
        ("env.0.tasks.links=[1, 2]", lambda r: r.env[0].tasks, {"links": [1, 2]}),
        ("model.path=models/a=b", lambda r: r.model.path, "models/a=b"),
        ('model.path="7"', lambda r: r.model.path, "7"),
        ("credit.name=rloo", lambda r: r.credit.name, "rloo"),
        ("trackers=['wandb']", lambda r: r.trackers, ("wandb",)),
    ],
)
def test_an_override_replaces_one_setting(small, override, where, value):
    plain, changed = load_recipe(small), load_recipe(small, ["credit.name=grpo", override])
    assert where(changed) == value != where(plain)


def test_the_last_override_wins(small):
    assert load_recipe(small, ["steps=7", "steps=8"]).steps == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", '"steps" is not an override; write key=value'),
        ("=3", "is not an override"),
        ("rollout.=3", "is not an override"),
        ("rollout..attempts=3", "is not an override"),
        ("env.2.weight=1", "2 is not an entry; there are 2, counted from 0"),
        ("env.-1.weight=1", "-1 is not an entry"),
        ("env.first.weight=1", "first is not an entry"),
        ("env.weight=1", "name which entry, for instance env.0.weight=2"),
        ("steps.more=1", "steps is a value, not a table"),
        ("env.0.wieght=1", "unknown key env.0.wieght; did you mean weight?"),
        ("rollout.group_sise=4", "unknown key rollout.group_sise; did you mean group_size?"),
        ("steps=soon", "steps: Input should be a valid integer"),
        ("max_lag=-1", "max_lag: "),
        ("colour=", '"colour=" removes nothing: the recipe has no colour'),
        ("env.1.colour=", "the recipe has no env.1.colour"),
    ],
)
def test_a_wrong_override_is_one_line(small, override, message):
    assert message in complaint(load_recipe, small, [override])


@few
@given(st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False)))
def test_an_override_is_read_as_toml(value):
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    tree = {}
    apply_override(tree, f"a.b={text}")
    assert tree == {"a": {"b": tomllib.loads(f"x = {text}")["x"]}}
    assert type(tree["a"]["b"]) is type(value)


# ---------------------------------------------------------------- frozen


def sections(section=Recipe):
    """Every table of a recipe."""
    yield section
    for field in section.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from sections(part)


def test_every_setting_is_described_and_every_table_frozen_and_closed():
    found = set(sections())
    assert len(found) >= 10
    for section in found:
        assert section.model_config["frozen"]
        assert section.model_config["extra"] == ("allow" if section is Choice else "forbid")
        assert issubclass(section, Section)
        undescribed = [name for name, field in section.model_fields.items() if not field.description]
        assert not undescribed, (section, undescribed)


@pytest.mark.parametrize("path", ["steps", "rollout.group_size", "credit.name", "sft.optimizer.warmup"])
def test_a_recipe_is_frozen(path):
    *parts, name = path.split(".")
    node = parse()
    for part in parts:
        node = getattr(node, part)
    with pytest.raises(ValidationError, match="frozen"):
        setattr(node, name, getattr(node, name))


@pytest.mark.parametrize("more", [{}, {"credit": {"name": "grpo", "norm_by_std": False}}, {"env": {"name": "guess"}}])
def test_a_recipe_survives_being_written_into_a_run_folder(more):
    recipe = parse(**more)
    assert parse_recipe(recipe.model_dump(mode="json"), "config.json") == recipe


@pytest.mark.parametrize("more", [{"model": {"path": "models/x"}}, {"sft": {"data": "talks.jsonl"}}])
def test_a_recipe_with_its_own_model_or_data_survives_being_written(more):
    recipe = parse(**more)
    assert parse_recipe(recipe.model_dump(mode="json"), "config.json") == recipe


@pytest.mark.parametrize(("update", "epochs", "expected"), [(0, 1, 1), (2, 1, 4), (8, 3, 3), (4, 2, 4)])
def test_updates_per_step(update, epochs, expected):
    assert parse(groups_per_step=8, groups_per_update=update, epochs=epochs).updates_per_step == expected


@pytest.mark.parametrize(("entry", "label"), [({}, "hops"), ({"dataset": "easy"}, "easy"), ({"name": "a.b:C"}, "C")])
def test_the_label_of_an_environment(entry, label):
    assert EnvironmentConfig(**{"name": "hops", **entry}).label == label


# ---------------------------------------------------------------- functions chosen by name


def plain(groups, scores):
    return None


def shaped(groups, scores, *, norm_by_std: bool = True, gamma: float = 1.0, unit: str = "token"):
    return None


def needy(groups, scores, *, length: int):
    return None


class Chosen:
    def __init__(self, guesses: int = 6, *, window: bool = False) -> None:
        pass


FUNCTIONS = {"plain": plain, "shaped": shaped, "needy": needy}


def chosen(**settings):
    return choose("credit", Choice(**settings), FUNCTIONS, ("groups", "scores"))


def test_the_settings_of_a_choice_are_its_functions_arguments():
    assert chosen(name="plain") == {}
    assert chosen(name="shaped", gamma=1, norm_by_std=False) == {"gamma": 1.0, "norm_by_std": False}
    assert chosen(name="needy", length=3) == {"length": 3}


def test_arguments_are_converted_to_the_types_of_the_signature():
    converted = chosen(name="shaped", gamma=1, norm_by_std="False")
    assert type(converted["gamma"]) is float
    assert converted["norm_by_std"] is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "shapd"}, "credit.name = 'shapd' does not exist; did you mean shaped?"),
        ({"name": "ppo"}, "credit.name = 'ppo' does not exist; known here: needy, plain, shaped"),
        ({"name": "plain", "gamma": 1.0}, "credit.gamma: credit plain takes no such setting; known here: none"),
        ({"name": "shaped", "gama": 1.0}, "credit.gama: credit shaped takes no such setting; did you mean gamma?"),
        ({"name": "shaped", "scores": 1}, "credit.scores: credit shaped takes no such setting"),
        ({"name": "shaped", "gamma": "high"}, "credit.gamma: Input should be a valid number"),
        ({"name": "shaped", "gamma": float("nan")}, "credit.gamma: must be finite (got nan)"),
        ({"name": "shaped", "gamma": float("inf")}, "credit.gamma: must be finite (got inf)"),
        ({"name": "needy"}, "credit.length is missing: credit needy needs it"),
    ],
)
def test_a_setting_the_function_would_not_use_is_refused(settings, message):
    assert message in complaint(lambda: chosen(**settings))


def test_the_settings_of_a_class_are_its_constructors():
    given_settings = {"guesses": "3", "window": True}
    assert check_arguments("hops", "env.settings", Chosen, given_settings) == {"guesses": 3, "window": True}
    found = complaint(check_arguments, "hops", "env.settings", Chosen, {"gueses": 3})
    assert found == "env.settings.gueses: hops takes no such setting; did you mean guesses?"
    assert "takes no such setting" in complaint(check_arguments, "hops", "env.settings", Chosen, {"self": 3})


def test_what_the_function_gets_is_what_was_checked():
    """`credit.norm_by_std=False` on the command line is no TOML, hence a string, and a non-empty string is true."""
    from support.assembling import parts_of
    from turnwise.learn.tiny import build_tokenizer

    credit = {"name": "grpo"}
    apply_override(credit, "norm_by_std=False")
    recipe = parse(credit=credit, engine={"max_num_seqs": 1})
    parts = parts_of(recipe, make_model(), build_tokenizer(["a b"]))
    found = parts.loop.stages.estimate([make_group([0.0, 1.0])], {})
    assert [array.tolist() for array in found] == [[-0.5, -0.5], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("tree", "on_cpu", "on_gpu"),
    [
        ({"rollout": {"max_trajectory_tokens": 1000, "max_prompt_tokens": 500}}, 4096, 16384),
        ({}, 4608, 16384),  # the longest attempt by default
        ({"rollout": {"max_trajectory_tokens": 20000, "max_prompt_tokens": 500}}, 20000, 20000),
        ({"max_tokens_per_microbatch": 700}, 700, 700),
    ],
)
def test_tokens_of_a_pass_follow_from_the_device_if_nobody_says(tree, on_cpu, on_gpu):
    recipe = parse_recipe({"env": [{"name": "hops"}], **tree}, "test")
    assert (recipe.tokens_per_pass("cpu"), recipe.tokens_per_pass("cuda")) == (on_cpu, on_gpu)
