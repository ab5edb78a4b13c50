import json

import pytest

from turnwise.assemble.checks import few_tasks
from turnwise.assemble.environments import (
    endpoint_of,
    environment_class,
    environment_makers,
    environments_of,
    read_tasks,
    tasks_of,
    training_order,
)
from turnwise.recipe.parse import parse_recipe
from turnwise.rollout.environments import DEMONSTRATED
from turnwise.types import Task

ONE = parse_recipe({"env": [{"name": "hops"}]}, "here")
TWO = parse_recipe({"env": [{"name": "hops"}, {"name": "guess", "dataset": "numbers"}]}, "here")


def read(folder, recipe, *rows):
    path = folder / "tasks.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return read_tasks(recipe, path)


def test_a_line_is_a_task(tmp_path):
    rows = [{"id": "a", "dataset": "hops", "data": {"links": 2}}, "", {"id": "a", "dataset": "numbers"}]
    tasks = read(tmp_path, TWO, *rows)
    assert tasks == [Task("a", "hops"), Task("a", "numbers")]
    assert [dict(task.data) for task in tasks] == [{"links": 2}, {}]


def test_the_only_environment_needs_no_name(tmp_path):
    assert read(tmp_path, ONE, {"id": "ü", "data": {"x": [1, None]}}) == [Task("ü", "hops")]


@pytest.mark.parametrize(
    ("recipe", "row", "message"),
    [
        (ONE, "{", "not JSON (Expecting property name enclosed in double quotes, column 2)"),
        (ONE, "3", 'expected {"id": ..., "dataset": ..., "data": {...}}, got int'),
        (ONE, {"data": {}}, "id: needs to be a text, got null"),
        (ONE, {"id": 3}, "id: needs to be a text, got 3"),
        (ONE, {"id": ""}, 'id: needs to be a text, got ""'),
        (ONE, {"id": "b", "dataset": "hop"}, 'dataset: "hop" is no environment of the recipe; did you mean hops?'),
        (ONE, {"id": "b", "dataset": None}, "dataset: null is no environment of the recipe"),
        (TWO, {"id": "b"}, "dataset: null is no environment of the recipe; known here: hops, numbers"),
        (ONE, {"id": "b", "data": [1]}, "data: needs to be an object, got [1]"),
        (ONE, {"id": "b", "date": {}}, 'unknown field "date"; did you mean data?'),
        (ONE, {"id": "a"}, 'id "a" is that of line 1; give each its own'),
    ],
)
def test_a_mistake_is_one_line_that_names_line_and_field(tmp_path, recipe, row, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path, recipe, {"id": "a", "dataset": "hops"}, "", row)
    assert str(error.value).startswith(f"{tmp_path / 'tasks.jsonl'}, line 3: {message}")
    assert "\n" not in str(error.value)


def test_files_that_hold_no_tasks(tmp_path):
    with pytest.raises(ValueError, match="holds no tasks"):
        read(tmp_path, ONE, "", " ")
    with pytest.raises(ValueError, match=r"\(No such file or directory\); give a number or a file"):
        read_tasks(ONE, tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not text"):
        read_tasks(ONE, tmp_path / "bytes")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("textarena", 'names no environment; write for instance "textarena:GuessTheNumber-v0"'),
        ("textarena:", 'names no environment; write for instance "textarena:GuessTheNumber-v0"'),
        ("textarna:GuessTheNumber-v0", "No module named 'textarna'; did you mean textarena:GuessTheNumber-v0?"),
        ("nowhere:Thing", "No module named 'nowhere'; is the module on PYTHONPATH?"),
        ("json:Thing", "module json has no Thing"),
        ("hop", "is not built in; did you mean hops?"),
    ],
)
def test_a_name_that_means_nothing_is_one_line(name, message):
    with pytest.raises(ValueError) as error:
        environment_class(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_adapters_win_over_modules_and_keep_their_names():
    kind = environment_class("textarena:GuessTheNumber-v0")
    assert kind is environment_class("textarena:GuessTheNumber-v0")
    assert kind is not environment_class("textarena:TicTacToe-v0")
    assert (kind.kind.name, kind.__name__) == ("GuessTheNumber-v0", "TextArena")
    assert environment_class("gem:game:Wordle-v0-easy").kind.name == "game:Wordle-v0-easy"


def test_a_library_that_is_not_there_says_how_to_install_it(monkeypatch):
    from turnwise.envs.adapters import adapted
    from turnwise.envs.adapters.gem import Gem

    monkeypatch.setattr(Gem, "library", "no_such_library")
    with pytest.raises(ValueError, match="gem:game:X-v1. needs no_such_library: pip install --no-deps gem-llm"):
        adapted("gem", "game:X-v1")


@pytest.mark.parametrize("name", ["textarena:GuessTheNumber-v0", "reasoning_gym:chain_sum", "bfcl:multi_turn_base"])
def test_splits_of_adapters_share_no_task(name):
    recipe = parse_recipe({"env": [{"name": name}]}, "here")
    train, heldout = (tasks_of(recipe, split)[recipe.env[0].label] for split in ("train", "heldout"))
    other = tasks_of(parse_recipe({"seed": 5, "env": [{"name": name}]}, "here"), "train")[recipe.env[0].label]
    contents = [{json.dumps(dict(task.data), sort_keys=True) for task in tasks} for tasks in (train, heldout, other)]
    assert not contents[0] & contents[1]
    assert not contents[2] & contents[1]
    assert not {task.id for task in (*train, *other)} & {task.id for task in heldout}


def test_an_environment_of_tools_needs_a_format_of_calls():
    with pytest.raises(ValueError, match='sql is made of tools; set rollout.tools = "auto"'):
        environment_makers(parse_recipe({"env": [{"name": "sql"}]}, "here"))


def game(**entry):
    return parse_recipe({"env": [{"name": "guess", **entry}], "evaluation": {"final_tasks": 128}}, "here")


def opened(recipe):
    return environments_of(recipe, endpoint_of(recipe))


def test_tasks_that_are_demonstrated_are_drawn_with_their_own_arguments():
    recipe = parse_recipe(
        {"env": [{"name": "hops", "tasks": {"count": 64, "links": [1, 4]}, "demonstrated": {"links": [1, 2]}}]}, "here"
    )
    shown, trained, held = (tasks_of(recipe, split)["hops"] for split in (DEMONSTRATED, "train", "heldout"))
    assert {task.data["links"] for task in shown} == {1, 2}
    assert {task.data["links"] for task in trained} == {1, 2, 3, 4}
    assert len(shown) == 64
    assert not {task.id for task in shown} & {task.id for task in held}


def test_without_arguments_of_their_own_training_tasks_are_demonstrated():
    assert tasks_of(ONE, DEMONSTRATED, 20) == tasks_of(ONE, "train", 20)


def test_arguments_of_demonstrated_tasks_are_checked():
    recipe = parse_recipe({"env": [{"name": "hops", "demonstrated": {"link": [1, 2]}}]}, "here")
    with pytest.raises(ValueError, match=r"env.demonstrated.*did you mean links\?"):
        tasks_of(recipe, DEMONSTRATED)


@pytest.mark.parametrize("seed", [0, 1])
def test_fresh_tasks_are_new_each_visit_the_same_each_run_and_never_held_out(seed):
    recipe = game(fresh=True, tasks={"high": 32}).model_copy(update={"seed": seed})
    first, second = (training_order(recipe, opened(recipe)) for _ in range(2))
    drawn = [first.draw().task for _ in range(300)]
    assert drawn == [second.draw().task for _ in range(300)]
    assert len({task.id for task in drawn}) > 256
    held = {(task.data["low"], task.data["high"]) for task in tasks_of(recipe, "heldout", 100)["guess"]}
    assert not held & {(task.data["low"], task.data["high"]) for task in drawn}


def test_seeds_draw_other_fresh_tasks():
    first, second = (
        training_order(recipe, opened(recipe)).draw().task
        for recipe in (game(fresh=True), game(fresh=True).model_copy(update={"seed": 1}))
    )
    assert first != second


class Alone:
    """An environment whose tasks do not depend on the seed."""

    def open(self, task): ...

    def step(self, message): ...

    def close(self): ...

    @staticmethod
    def tasks(split, seed):
        return [Task("only" if split == "train" else "other", "alone")]


def test_fresh_tasks_need_a_seed_that_matters():
    recipe = parse_recipe({"env": [{"name": f"{__name__}:Alone", "fresh": True}]}, "here")
    with pytest.raises(ValueError, match="makes the same task for every seed; remove fresh"):
        training_order(recipe, opened(recipe))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"fresh": True, "tasks": {"count": 5}}, "tasks.count is ignored with fresh = true"),
        ({"fresh": True, "data": "a.jsonl"}, "fresh draws by the environment's tasks"),
        ({"demonstrated": {"count": 5}, "data": "a.jsonl"}, "demonstrated is ignored with data"),
    ],
)
def test_what_tasks_would_ignore_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        game(**entry)


@pytest.mark.parametrize(("steps", "entry", "warns"), [(16, {}, False), (64, {}, True), (64, {"fresh": True}, False)])
def test_tasks_that_can_be_learned_by_heart_are_named(steps, entry, warns):
    recipe = game(**entry).model_copy(update={"steps": steps, "groups_per_step": 16})
    assert few_tasks(recipe, opened(recipe)) == (
        ["guess has 256 training tasks, and 64 steps visit each 4 times: few enough to be learned by heart; raise "
         "env.tasks.count, or set env.fresh=true"] if warns else []
    )  # fmt: skip
