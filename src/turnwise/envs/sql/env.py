"""sql: answer questions about a real database by writing SQL, with a look at results before the answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from turnwise.envs.base import Reply
from turnwise.envs.split import draw_tasks
from turnwise.envs.sql.database import PATIENCE, Database, QueryError, Table
from turnwise.envs.sql.flights import SALT, SHAPES, draw_question, entities, flights_file
from turnwise.envs.tools import ToolBroken, ToolEnvironment, ToolError, tool
from turnwise.messages import Message, ToolCall
from turnwise.types import Task

SYSTEM = (
    "You answer questions about a SQLite database. Look at it with the tool query as often as you need. Then call the "
    "tool answer with the one SELECT whose result is the answer: what is asked for, no other columns, not rounded.\n"
    "The tables:\n"
)
SILENT = "Call the tool query to look at the database, or the tool answer with the SELECT whose result is the answer."
MOST_ROWS = 1000
"""Rows of an answer that are compared."""
LONGEST_CELL = 200


class Sql(ToolEnvironment):
    """An attempt: a question, and a database to look at before the answer.

    Example:
        user: How many flights did JetBlue Airways have?
        assistant: query(sql="SELECT carrier FROM airlines WHERE name = 'JetBlue Airways'")
        tool: carrier / B6
        assistant: answer(sql="SELECT count(*) FROM flights WHERE carrier = 'B6'")      -> outcome 1
    """

    task_fields: ClassVar[dict[str, Any]] = {"question": str, "sql": str}

    def __init__(
        self, database: str = "", tables: tuple[str, ...] = (), rows: int = 10, characters: int = 1500
    ) -> None:
        """database: a SQLite file of your own, for tasks of your own; empty for flights from New York. tables: which of
        its tables the model is told of; empty for all. rows, characters: how much of a result it sees."""
        if rows < 1 or characters < 1:
            raise ValueError(f"rows = {rows} and characters = {characters}: the model needs to see something")
        if database and not Path(database).is_file():
            raise ValueError(f'there is no file {database}; give database = "file.sqlite", or leave it out')
        self.database = database_of(Path(database).resolve() if database else flights_file())
        self.tables = tables
        self.rows = rows
        self.longest = characters

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        """Refuse, before anything starts, what an attempt could not use."""
        made = cls(**settings)
        schema_of(made.database, made.tables)

    @staticmethod
    def tasks(split: str, seed: int, count: int = 2048, shapes: tuple[str, ...] = ()) -> Iterator[Task]:
        """Different questions about flights, of some shapes or of all; held-out ones are about airlines, airports,
        planes and makers of planes that no training question is about."""
        if unknown := [shape for shape in shapes if shape not in SHAPES]:
            raise ValueError(f"shapes: there is no {unknown[0]}; there are {', '.join(SHAPES)}")
        draw = draw_question(entities(flights_file()), shapes or tuple(SHAPES))
        return draw_tasks(
            "sql", split, count, seed, draw, lambda data: [SALT, data["entity"]], lambda data: data["question"]
        )

    async def open(self, task: Task) -> Reply:
        self.system = SYSTEM + schema_of(self.database, self.tables)
        self.counts = {"queries": 0, "errors": 0}
        self.looked = False
        return await super().open(task)

    def question(self, task: Task) -> str:
        return str(task.data["question"])

    async def step(self, message: Message) -> Reply:
        return await super().step(message) if message.calls else Reply((Message("user", SILENT),))

    @tool(seconds=PATIENCE)
    def query(self, sql: str) -> str:
        """Run a SELECT and see the first rows of its result.

        Args:
            sql: One SELECT statement.
        """
        self.counts["queries"] += 1
        return written(self.result(sql, self.rows))

    @tool(seconds=PATIENCE)
    def answer(self, sql: str) -> Reply:
        """Answer the question, which ends the conversation.

        Args:
            sql: One SELECT statement, whose result is the answer.
        """
        try:
            found = self.result(sql, MOST_ROWS)
        except ToolError:
            return Reply(finished=True, marks=self.counts)
        right = same(found, self.right_result(), ordered=bool(self.task.data.get("ordered")))
        return Reply(finished=True, outcome=float(right), marks=self.counts)

    def result(self, sql: str, rows: int) -> Table:
        try:
            return self.database.query(sql, rows=rows)
        except QueryError as error:
            self.counts["errors"] += 1
            raise ToolError(str(error)) from None

    def right_result(self) -> Table:
        try:
            found = self.database.query(str(self.task.data["sql"]), rows=MOST_ROWS)
        except QueryError as error:
            raise ToolBroken(f"task {self.task.id}: its own query fails: {error}") from None
        if found.more:
            raise ToolBroken(f"task {self.task.id}: its own query gives more than {MOST_ROWS} rows")
        return found

    def demonstrate(self, noise: float, random: Random) -> Message:
        """A look, and then the answer; with probability `noise` an answer to something else, or no SQL at all."""
        right = str(self.task.data["sql"])
        verb, sql = ("answer", right) if self.looked else ("query", str(self.task.data.get("look", right)))
        self.looked = True
        if random.random() < noise:
            verb, sql = random.choice((("answer", "SELECT count(*) FROM flights"), ("query", right[: len(right) // 2])))
        return Message("assistant", "", calls=(ToolCall(verb, {"sql": sql}),))


@cache
def database_of(path: Path) -> Database:
    """The same workers for all attempts of a process."""
    return Database(path)


@cache
def schema_of(database: Database, tables: tuple[str, ...]) -> str:
    """The tables of a database, a line each: some, or all that are its own."""
    try:
        asked = "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY rowid"
        found = {name: " ".join(str(sql).split()) for name, sql in database.query(asked, rows=100).rows}
    except QueryError as error:
        raise ValueError(f"cannot read the tables of {database.path}: {error}") from None
    if missing := [name for name in tables if name not in found]:
        raise ValueError(f"tables: there is no {missing[0]}; there are {', '.join(found)}")
    return "\n".join(found[name] for name in tables or found)


def written(table: Table) -> str:
    """A result as the model sees it."""
    lines = [" | ".join(table.columns), *(" | ".join(map(cell, row)) for row in table.rows)]
    if not table.rows:
        lines.append("no rows")
    return "\n".join([*lines, f"... more than {len(table.rows)} rows"] if table.more else lines)


def cell(value: Any) -> str:
    text = "NULL" if value is None else " ".join(str(value).split())
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]}..."


# ---------------------------------------------------------------- comparing results


def same(found: Table, right: Table, *, ordered: bool) -> bool:
    """Whether two results have the same rows, in the same order where that was asked for. What columns are called does
    not matter, nor whether a number is whole by type."""
    if found.more or len(found.rows) != len(right.rows) or len(found.columns) != len(right.columns):
        return False
    rows, others = list(found.rows), list(right.rows)
    if not ordered:
        rows.sort(key=place)
        others.sort(key=place)
    return all(alike(a, b) for row, other in zip(rows, others, strict=True) for a, b in zip(row, other, strict=True))


def place(row: tuple[Any, ...]) -> list[tuple[int, float, str]]:
    """Where a row comes in an order of our own, in which numbers that are alike are neighbours."""
    return [(1, round(v, 6), "") if is_number(v) else (0, 0.0, "") if v is None else (2, 0.0, str(v)) for v in row]


def alike(value: Any, other: Any) -> bool:
    if is_number(value) and is_number(other):
        return math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-9)
    return type(value) is type(other) and bool(value == other)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
