import importlib.util
from itertools import islice
from random import Random

import pytest

from support.acting import attempted, byte_tokenizer, limits, run, says
from support.paths import RECIPES
from turnwise.assemble.environments import tasks_of
from turnwise.envs.sql import env as sql
from turnwise.envs.sql import flights
from turnwise.envs.sql.database import Table
from turnwise.envs.sql.env import Sql, same_rows, table_text
from turnwise.messages import Message, ToolCall
from turnwise.recipe.parse import load_recipe
from turnwise.rollout.demonstrate import Demonstrator
from turnwise.rollout.render.renderer import Renderer
from turnwise.rollout.scene import Attempt
from turnwise.types import Status, Task

ROWS_OF = flights.rows_of
RENDER = Renderer(byte_tokenizer(), tools="hermes")
ROOMY = {"max_prompt_tokens": 30_000, "max_action_tokens": 2_000, "max_trajectory_tokens": 32_000, "call_seconds": 90.0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def flights_once(cache, own_cache, monkeypatch):
    """The database is made once for all tests of this file, with every second flight, which leaves planes enough."""
    monkeypatch.setenv("TURNWISE_CACHE", str(cache))
    monkeypatch.setattr(
        flights, "rows_of", lambda source, table: islice(ROWS_OF(source, table), 0, None, 2 ** (table == "flights"))
    )
    return flights.flights_file()


@pytest.fixture
def tasks(flights_once):
    return list(Sql.tasks("heldout", 0, count=60))


def called(name, text):
    return Message("assistant", "", calls=(ToolCall(name, {"sql": text}),))


async def played(task, *said):
    environment = Sql()
    await environment.open(task)
    return [await environment.step(message) for message in said]


# ---------------------------------------------------------------- questions


def test_the_recipe_finds_its_tasks():
    recipe = load_recipe(RECIPES / "sql.toml", [])
    assert len(tasks_of(recipe, "train")["sql"]) == recipe.env[0].tasks["count"]
    assert len(tasks_of(recipe, "heldout", recipe.evaluation.final_tasks)["sql"]) == recipe.evaluation.final_tasks


def test_splits_share_no_entity():
    about = {split: {t.data["entity"] for t in Sql.tasks(split, 7, count=400)} for split in ("train", "heldout")}
    assert len(about["heldout"]) > 40
    assert not about["train"] & about["heldout"]
    assert {t.data["shape"] for t in Sql.tasks("heldout", 7, count=400)} == set(flights.SHAPES)
    assert {t.data["shape"] for t in Sql.tasks("train", 7, count=400)} == set(flights.SHAPES)


def test_no_answer_is_nothing(tasks):
    """Or nothing would be an answer."""
    database = Sql().database
    for task in tasks:
        rows = database.query(task.data["sql"], rows=100).rows
        assert rows, task.data
        assert not {None, 0, ""} & {value for row in rows for value in row}, task.data


def test_questions_can_be_chosen_by_shape():
    chosen = list(Sql.tasks("train", 0, count=8, shapes=("plane_built",)))
    assert {task.data["shape"] for task in chosen} == {"plane_built"}
    assert len({task.id for task in chosen}) == 8
    with pytest.raises(ValueError, match="there is no planes; there are airline_flights,"):
        Sql.tasks("train", 0, shapes=("planes",))


def test_values_are_written_as_sql_has_them():
    assert flights.filled("a = {x} AND b = {y}", {"x": "O'Hare", "y": 3}) == "a = 'O''Hare' AND b = 3"


# ---------------------------------------------------------------- attempts


def test_an_expert_scores_one_and_a_clumsy_one_less(tasks):
    def totals(noise):
        expert = Demonstrator({"sql": Sql}, RENDER, limits(**ROOMY, attempt_seconds=300.0), 0, noise)
        return [run(expert.group(task, 0), 300.0).trajectories[0].total for task in tasks[:12]]

    assert totals(0.0) == [1.0] * 12
    assert 0.0 < sum(totals(0.6)) < 12.0


GUESSES = (
    "SELECT 0", "SELECT NULL", "SELECT 1", "SELECT count(*) FROM flights", "SELECT name FROM airlines",
    "SELECT * FROM flights", "SELECT * FROM planes WHERE 0", "SELECT dest FROM flights LIMIT 1", "not SQL",
    "SELECT max(distance) FROM flights", "DROP TABLE flights",
)  # fmt: skip


def test_guesses_are_worth_nothing(tasks):
    random = Random(0)
    for task in tasks[:20]:
        (reply,) = run(played(task, called("answer", random.choice(GUESSES))), 90.0)
        assert reply.finished
        assert reply.outcome == 0.0


TASK = Task("t", "sql", {"question": "?", "sql": "SELECT carrier, name FROM airlines WHERE carrier < 'B'"})


def test_a_result_is_seen_and_then_answered():
    looked, wrong, answered = run(
        played(
            TASK,
            called("query", "SELECT carrier FROM airlines WHERE name LIKE 'Jet%' OR name LIKE 'A%'"),
            called("query", "SELECT nix FROM airlines"),
            called(
                "answer", "SELECT carrier c, name FROM airlines WHERE carrier IN ('AS', 'AA', '9E') ORDER BY 2 DESC"
            ),
        ),
        90.0,
    )
    assert looked.messages[0].content.split("\n") == ["carrier", "AA", "AS", "B6", "FL"]
    assert wrong.messages[0].content == "error: no such column: nix"
    assert answered.outcome == 1.0
    assert answered.marks == {"queries": 2, "errors": 1}


def test_words_without_a_call_are_asked_again():
    (reply,) = run(played(TASK, Message("assistant", "It is B6.")))
    assert reply.messages == (Message("user", sql.SILENT),)
    assert not reply.finished


def test_order_counts_where_it_was_asked_for():
    ordered = Task("t", "sql", {"question": "?", "sql": "SELECT carrier FROM airlines ORDER BY 1", "ordered": True})
    other = "SELECT carrier FROM airlines ORDER BY 1 DESC"
    assert run(played(ordered, called("answer", other)))[0].outcome == 0.0
    assert run(played(ordered, called("answer", ordered.data["sql"])))[0].outcome == 1.0


def test_a_failing_gold_query_fails_the_attempt():
    broken = Task("t", "sql", {"question": "?", "sql": "SELECT nix"})
    said = '<tool_call>{"name": "answer", "arguments": {"sql": "SELECT 1"}}</tool_call>'
    made = run(
        attempted(Sql, says(said, render=RENDER), render=RENDER, which=Attempt(0, "train", broken), **ROOMY), 90.0
    )
    assert made.status is Status.failed


def test_a_long_result_is_cut():
    async def long():
        environment = Sql(rows=3, characters=60)
        await environment.open(TASK)
        return await environment.step(called("query", "SELECT * FROM airports"))

    text = run(long()).messages[0].content
    assert text.startswith("faa | name | lat")
    assert "cut after 60 of" in text


def test_the_prompt_tells_the_tables_and_the_tools():
    made = run(
        attempted(Sql, says("x", render=RENDER), render=RENDER, which=Attempt(0, "train", TASK), max_turns=1, **ROOMY),
        90.0,
    )
    shown = RENDER.decode(made.turns[0].prompt)
    assert "CREATE TABLE airlines (carrier TEXT PRIMARY KEY, name TEXT)" in shown
    assert '"name": "answer"' in shown
    assert "sqlite_stat" not in shown
    some = Sql(tables=("planes",))
    run(some.open(TASK))
    assert "airlines (" not in some.system


def test_settings_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        Sql.check_settings(database=str(tmp_path / "none.sqlite"))
    with pytest.raises(ValueError, match="both must be at least 1"):
        Sql.check_settings(rows=0)
    with pytest.raises(ValueError, match="there is no trains; there are airlines, airports, planes, weather, flights"):
        Sql.check_settings(tables=("flights", "trains"))
    (tmp_path / "text").write_text("x" * 999)
    with pytest.raises(ValueError, match="cannot read the tables"):
        Sql.check_settings(database=str(tmp_path / "text"))


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "turnwise\[sql\]"'):
        Sql()


# ---------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    ("found", "right", "equal"),
    [
        ([(1,), (2,)], [(2,), (1,)], True),
        ([(1,), (1,)], [(1,)], False),
        ([(1,)], [(1.0,)], True),
        ([(1 / 3,)], [(0.33333333334,)], True),
        ([(0.33,)], [(1 / 3,)], False),
        ([("1",)], [(1,)], False),
        ([("a", 1)], [(1, "a")], False),
        ([(None, 2)], [(None, 2)], True),
        ([(None,)], [(0,)], False),
        ([("",)], [(None,)], False),
        ([], [], True),
        ([(1, "b"), (1, "a")], [(1, "a"), (1, "b")], True),
        ([(1, 2)], [(1,)], False),
    ],
)
def test_results_are_compared_as_sets_of_rows(found, right, equal):
    def table(rows):
        return Table(("x",) * (len(rows[0]) if rows else 1), tuple(rows))

    assert same_rows(table(found), table(right), ordered=False) == equal


def test_more_rows_than_are_compared_are_no_answer():
    some = Table(("x",), ((1,),))
    assert not same_rows(Table(("x",), ((1,),), more=True), some, ordered=False)


def test_results_in_words():
    assert table_text(Table(("a", "b"), ((1, None), ("x\ny", 2.5)), more=True)) == (
        "a | b\n1 | NULL\nx y | 2.5\n... more than 2 rows"
    )
    assert table_text(Table(("a",), ())) == "a\nno rows"
