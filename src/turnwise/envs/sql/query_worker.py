"""A process that answers queries on a SQLite file which nobody can write: JSON lines in, JSON lines out.

    {"sql": "SELECT 1", "rows": 20}    ->    {"columns": ["1"], "rows": [[1]], "more": false}
    {"sql": "DROP TABLE flights"}      ->    {"error": "only reading is allowed"}

Run as a file of its own, by `database.py`, with nothing but the standard library. What is written here is for queries
of a hostile author: the connection is read-only and takes no locks, an authorizer allows reading and harmless functions
and nothing else, steps and seconds of work are counted, and sizes are bounded twice, by SQLite and by the kernel.
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
"""Steps of SQLite's machine between two looks at the limits."""
LONGEST_VALUE = 100_000
"""Bytes of a value or a row."""
LARGEST = 1_000_000
"""Characters of a result."""
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
"""What a query may call: nothing that makes large values of small ones, differs from call to call, or reaches out."""


def allowed(action: int, first: str | None, second: str | None, database: str | None, inside: str | None) -> int:
    """The authorizer: reading, and functions of the list."""
    reads = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
    calls = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FUNCTIONS
    return sqlite3.SQLITE_OK if reads or calls else sqlite3.SQLITE_DENY


class Meter:
    """Counts what a query has used; true where it is to stop."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps = steps
        self.end = time.process_time() + seconds
        # One step may take for ever, and nothing looks at the clock meanwhile but the kernel, which ends the process.
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
    made = sqlite3.connect(
        f"file:{quote(path)}?mode=ro&immutable=1", uri=True, isolation_level=None, cached_statements=0
    )
    made.execute("PRAGMA temp_store = MEMORY")
    made.execute("PRAGMA trusted_schema = OFF")
    for what, most in LIMITS.items():
        made.setlimit(what, most)
    made.set_authorizer(allowed)
    return made


def answer(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """What a request comes to."""
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
    """A value that JSON has."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def confine(memory: int) -> None:
    """Bound what the kernel gives this process: memory, and no byte of a file."""
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(what, (most, most))


def main() -> None:
    path, memory = sys.argv[1], int(sys.argv[2])
    confine(memory)
    for line in sys.stdin.buffer:
        try:
            made = json.dumps(answer(path, json.loads(line)))
        except MemoryError:
            made = '{"error": "the result takes too much memory; look at fewer rows"}'
        sys.stdout.write(made + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
