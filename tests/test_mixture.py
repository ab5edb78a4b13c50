import json

import pytest

from turnwise.mixture import read_tasks
from turnwise.recipes import parse_recipe
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
