"""sql: answer questions about a real database by writing SQL. The model may look at results before it answers."""

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
"""The largest number of rows that are compared."""
LONGEST_CELL = 200


class Sql(ToolEnvironment):
    """An attempt: a question, and a database to query before the answer.

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
        """database: your SQLite file, for tasks from your file; empty for flights from New York. tables: the tables
        that the prompt describes; empty for all. rows, characters: how much of a result the model sees."""
        if rows < 1 or characters < 1:
            raise ValueError(f"rows = {rows} and characters = {characters}: both must be at least 1")
        if database and not Path(database).is_file():
            raise ValueError(f"there is no file {database}; set database to a SQLite file, or remove it")
        self.database = database_of(Path(database).resolve() if database else flights_file())
        self.tables = tables
        self.rows = rows
        self.longest = characters

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        """Refuse settings that an attempt could not use, before the run starts."""
        environment = cls(**settings)
        schema_of(environment.database, environment.tables)

    @staticmethod
    def tasks(split: str, seed: int, count: int = 2048, shapes: tuple[str, ...] = ()) -> Iterator[Task]:
        """Different questions about flights, of the given shapes or of all. Held-out questions are about airlines,
        airports, planes and manufacturers that no training question is about."""
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
        return table_text(self.result(sql, self.rows))

    @tool(seconds=PATIENCE)
    def answer(self, sql: str) -> Reply:
        """Answer the question, which ends the conversation.

        Args:
            sql: One SELECT statement, whose result is the answer.
        """
        try:
            result = self.result(sql, MOST_ROWS)
        except ToolError:
            return Reply(finished=True, marks=self.counts)
        right = same_rows(result, self.right_result(), ordered=bool(self.task.data.get("ordered")))
        return Reply(finished=True, outcome=float(right), marks=self.counts)

    def result(self, sql: str, rows: int) -> Table:
        try:
            return self.database.query(sql, rows=rows)
        except QueryError as error:
            self.counts["errors"] += 1
            raise ToolError(str(error)) from None

    def right_result(self) -> Table:
        try:
            table = self.database.query(str(self.task.data["sql"]), rows=MOST_ROWS)
        except QueryError as error:
            raise ToolBroken(f"task {self.task.id}: its gold query fails: {error}") from None
        if table.more:
            raise ToolBroken(f"task {self.task.id}: its gold query gives more than {MOST_ROWS} rows")
        return table

    def demonstrate(self, noise: float, random: Random) -> Message:
        """First a query, then the answer; with probability `noise` a wrong answer, or a query that is cut in half."""
        right = str(self.task.data["sql"])
        verb, sql = ("answer", right) if self.looked else ("query", str(self.task.data.get("look", right)))
        self.looked = True
        if random.random() < noise:
            verb, sql = random.choice((("answer", "SELECT count(*) FROM flights"), ("query", right[: len(right) // 2])))
        return Message("assistant", "", calls=(ToolCall(verb, {"sql": sql}),))


@cache
def database_of(path: Path) -> Database:
    """The database of a file. All attempts of a process share its workers."""
    return Database(path)


@cache
def schema_of(database: Database, tables: tuple[str, ...]) -> str:
    """The schema of the given tables, or of all, one line for each."""
    try:
        statement = (
            "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY rowid"
        )
        schemas = {name: " ".join(str(sql).split()) for name, sql in database.query(statement, rows=100).rows}
    except QueryError as error:
        raise ValueError(f"cannot read the tables of {database.path}: {error}") from None
    if missing := [name for name in tables if name not in schemas]:
        raise ValueError(f"tables: there is no {missing[0]}; there are {', '.join(schemas)}")
    return "\n".join(schemas[name] for name in tables or schemas)


def table_text(table: Table) -> str:
    """A result as the model sees it."""
    lines = [" | ".join(table.columns), *(" | ".join(map(cell, row)) for row in table.rows)]
    if not table.rows:
        lines.append("no rows")
    return "\n".join([*lines, f"... more than {len(table.rows)} rows"] if table.more else lines)


def cell(value: Any) -> str:
    text = "NULL" if value is None else " ".join(str(value).split())
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]}..."


# ---------------------------------------------------------------- comparing results


def same_rows(result: Table, right: Table, *, ordered: bool) -> bool:
    """Whether two results have the same rows, with `ordered` in the same order. Names of columns do not matter, and 1
    equals 1.0."""
    if result.more or len(result.rows) != len(right.rows) or len(result.columns) != len(right.columns):
        return False
    rows, right_rows = list(result.rows), list(right.rows)
    if not ordered:
        rows.sort(key=sort_key)
        right_rows.sort(key=sort_key)
    return all(
        equal_values(a, b) for row, other in zip(rows, right_rows, strict=True) for a, b in zip(row, other, strict=True)
    )


def sort_key(row: tuple[Any, ...]) -> list[tuple[int, float, str]]:
    """A sort key under which numbers that are almost equal are neighbours."""
    return [(1, round(v, 6), "") if is_number(v) else (0, 0.0, "") if v is None else (2, 0.0, str(v)) for v in row]


def equal_values(value: Any, other: Any) -> bool:
    if is_number(value) and is_number(other):
        return math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-9)
    return type(value) is type(other) and bool(value == other)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
