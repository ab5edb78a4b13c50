"""A process that answers queries on a read-only SQLite file: JSON lines in, JSON lines out.

    {"sql": "SELECT 1", "rows": 20}    ->    {"columns": ["1"], "rows": [[1]], "more": false}
    {"sql": "DROP TABLE flights"}      ->    {"error": "only reading is allowed"}

`database.py` runs this file as a program; it imports only the standard library. Queries are hostile input: the
connection is read-only and takes no locks, an authorizer allows only reading and harmless functions, steps and CPU
seconds are limited, and both SQLite and the kernel limit sizes.
"""

from __future__ import annotations

import json
import math
import resource
import sqlite3
import sys
import time
from typing import Any
from urllib.parse import quote

EVERY = 1000
"""Steps of SQLite's virtual machine between two checks of the limits."""
LONGEST_VALUE = 100_000
"""The largest value or row, in bytes."""
LARGEST = 1_000_000
"""The largest result, in characters."""
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: LONGEST_VALUE,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 50_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 20,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
FUNCTIONS = frozenset(
    "abs avg ceil ceiling coalesce count cume_dist date datetime dense_rank first_value floor glob group_concat ifnull "
    "iif instr julianday lag last_value lead length like lower ltrim max min mod nth_value ntile nullif percent_rank "
    "rank replace round row_number rtrim sign sqrt strftime substr substring sum time total trim typeof unixepoch upper"
    "".split()
)
"""Functions that a query may call: none makes large values from small ones, is random, or leaves the database."""


def allowed(action: int, first: str | None, second: str | None, database: str | None, inside: str | None) -> int:
    """The authorizer: allows reading and the listed functions."""
    reads = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
    calls = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FUNCTIONS
    return sqlite3.SQLITE_OK if reads or calls else sqlite3.SQLITE_DENY


class Meter:
    """Counts the steps and seconds of a query; calling it returns whether the query must stop."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps = steps
        self.end = time.process_time() + seconds
        # A single step may take for ever without calling this meter; then the kernel ends the process.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(self.end) + 1, resource.RLIM_INFINITY))
        self.why = ""

    def __call__(self) -> bool:
        self.steps -= EVERY
        if self.steps < 0:
            self.why = "the query does too much work; look at fewer rows"
        elif time.process_time() > self.end:
            self.why = "the query takes too long; look at fewer rows"
        return bool(self.why)


def connect(path: str) -> sqlite3.Connection:
    """A connection that can neither write nor lock."""
    connection = sqlite3.connect(
        f"file:{quote(path)}?mode=ro&immutable=1", uri=True, isolation_level=None, cached_statements=0
    )
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA trusted_schema = OFF")
    for limit, most in LIMITS.items():
        connection.setlimit(limit, most)
    connection.set_authorizer(allowed)
    return connection


def answer(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    meter = Meter(int(request.get("steps", 20_000_000)), float(request.get("seconds", 10.0)))
    connection = connect(path)
    try:
        connection.set_progress_handler(meter, EVERY)
        cursor = connection.execute(request["sql"])
        if cursor.description is None:
            return {"error": "write one SELECT"}
        rows: list[list[Any]] = []
        size, more = 0, False
        for row in cursor:
            size += sum(len(value) if isinstance(value, (str, bytes)) else 8 for value in row)
            if size > LARGEST:
                return {"error": "the result is too large; select less"}
            more = len(rows) == int(request.get("rows", 20))
            if more:
                break
            rows.append([plain(value) for value in row])
        return {"columns": [str(column[0]) for column in cursor.description], "rows": rows, "more": more}
    except MemoryError:
        return {"error": "the query takes too much memory; look at fewer rows"}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        return {"error": meter.why or in_words(error)}
    finally:
        connection.close()


def in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "not authorized" in text or "prohibited" in text:
        return "only reading is allowed, with the usual functions"
    if "one statement at a time" in text:
        return "write one SELECT"
    return text[:300] or type(error).__name__


def plain(value: Any) -> Any:
    """The value in a form that JSON can write."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def confine(memory: int) -> None:
    """Limit this process: so much memory, and no writing to files."""
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(limit, (most, most))


def main() -> None:
    path, memory = sys.argv[1], int(sys.argv[2])
    confine(memory)
    for line in sys.stdin.buffer:
        try:
            line_out = json.dumps(answer(path, json.loads(line)))
        except MemoryError:
            line_out = '{"error": "the result takes too much memory; look at fewer rows"}'
        sys.stdout.write(line_out + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
