import json

import pytest

from turnwise.assemble import task_tables
from turnwise.assemble.environments import tasks_of
from turnwise.assemble.task_tables import given_tasks
from turnwise.envs.guess import Guess
from turnwise.envs.split import is_heldout
from turnwise.recipe.parse import parse_recipe
from turnwise.types import Task

GUESS = {"low": 1, "high": 9, "secret": 4}


class Anything:
    """An environment that says nothing about its tasks."""


def table(folder, *rows, name="tasks.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def given(source, split="train", heldout="", kind=Anything):
    return list(given_tasks(source, heldout, split, "mine", kind))


def test_a_row_is_the_data_or_has_it(tmp_path):
    rows = [{"question": "a", "id": "first"}, {"id": 7, "data": {"question": "b"}}, {"question": "c"}]
    first, second, third = given(table(tmp_path, *rows), heldout="unused")
    assert (first.id, dict(first.data)) == ("first", {"question": "a", "id": "first"})
    assert (second.id, dict(second.data)) == ("7", {"question": "b"})
    assert dict(third.data) == {"question": "c"}
    assert first.dataset == "mine"


def test_a_name_that_is_not_given_comes_from_the_content(tmp_path):
    rows = [{"question": "a"}, {"question": "b"}]
    names = [task.id for task in given(table(tmp_path, *rows), heldout="unused")]
    assert len(set(names)) == 2
    assert names[::-1] == [task.id for task in given(table(tmp_path, *rows[::-1]), heldout="unused")]


def test_a_fifth_is_held_out_and_stays_so(tmp_path):
    source = table(tmp_path, *({"n": n} for n in range(500)))
    train, heldout = (given(source, split) for split in ("train", "heldout"))
    assert {task.id for task in train}.isdisjoint(task.id for task in heldout)
    assert len(train) + len(heldout) == 500
    assert 60 < len(heldout) < 140


def test_a_table_for_each_split_is_taken_whole(tmp_path):
    train = table(tmp_path, *({"n": n} for n in range(9)))
    heldout = table(tmp_path, *({"n": -n} for n in range(5)), name="heldout.jsonl")
    assert [task.data["n"] for task in given(train, "train", heldout)] == list(range(9))
    assert [task.data["n"] for task in given(train, "heldout", heldout)] == [0, -1, -2, -3, -4]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "expected an object with a name for every field, got list"),
        ({"low": 1, "high": 9, "secrt": 3}, "secret: is missing; did you mean secrt?"),
        ({**GUESS, "high": "9"}, 'high: Input should be a valid integer, got "9"'),
        ({"id": "", "data": GUESS}, 'id: needs to be a text or a number, got ""'),
        ({"id": "a", "data": GUESS}, 'id "a" is that of {source}, row 1; give each its own'),
    ],
)
def test_a_mistake_names_the_row_and_the_field(tmp_path, row, message):
    source = table(tmp_path, {"id": "a", "data": GUESS}, row)
    with pytest.raises(ValueError) as error:
        given(source, heldout="unused", kind=Guess)
    assert str(error.value) == f"{source}, row 2: {message.format(source=source)}"


def test_rows_of_python_code_may_be_tasks_and_must_be_json(tmp_path, monkeypatch):
    (tmp_path / "their_rows.py").write_text(
        "from turnwise.types import Task\nGOOD = [Task('a', 'x', {'n': 1})]\nBAD = [{'n': 1, 'when': object()}]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert given("their_rows:GOOD", heldout="unused") == [Task("a", "mine")]
    with pytest.raises(ValueError, match="their_rows:BAD, row 1: when: cannot be written as JSON"):
        given("their_rows:BAD", heldout="unused")


def test_a_recipe_takes_tasks_from_a_table(tmp_path):
    rows = ({"id": str(n), "data": {**GUESS, "secret": n % 9 + 1}} for n in range(100))
    recipe = parse_recipe({"env": [{"name": "guess", "data": table(tmp_path, *rows)}]}, "here")
    train, heldout = (tasks_of(recipe, split)["guess"] for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 100
    assert train[0].data["high"] == 9


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"heldout": "x.jsonl"}, "heldout is ignored without data; set data too"),
        ({"data": "x.jsonl", "tasks": {"count": 3}}, "tasks is ignored with data, which holds them; remove one"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        parse_recipe({"env": [{"name": "guess", **entry}]}, "here")


def test_a_small_table_is_split_with_a_hint(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(task_tables.log, "warning", lambda line, *parts: said.append(line % parts))
    assert not any(map(is_heldout, "abcd"))
    source = table(tmp_path, *({"id": name} for name in "abcd"))
    train, heldout = (given(source, split) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (3, 1)
    assert {task.id for task in train}.isdisjoint(task.id for task in heldout)
    hint = f"{source} has only 4 tasks: 1 held out, 3 to train on; name tasks to evaluate on in env.heldout"
    assert said == [hint]


def test_one_task_cannot_be_split(tmp_path):
    with pytest.raises(
        ValueError, match="has 1 task, too few to hold one out; name tasks to evaluate on in env.heldout"
    ):
        given(table(tmp_path, {"n": 1}))
    with pytest.raises(ValueError, match="has 0 tasks, too few"):
        given(table(tmp_path))
