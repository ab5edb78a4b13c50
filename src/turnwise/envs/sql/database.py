"""A SQLite file for queries of a hostile author, answered by worker processes that have limits.

A query that finds a hole in SQLite can only break its worker, the memory of a query has a limit that no other query
shares, and a query that does not stop can be killed.
"""

from __future__ import annotations

import json
import queue
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from turnwise.envs.child_process import kill_child, start_child
from turnwise.envs.sql import query_worker

MEMORY = 512 << 20
"""Bytes a worker may have."""
SECONDS = 10.0
"""Of work for a query: what counts is what it does, and not who else is on the machine."""
STEPS = 30_000_000
"""Of SQLite's machine: about two seconds."""
PATIENCE = 120.0
"""Seconds of the clock after which a worker that has not stopped by itself is killed."""


class QueryError(Exception):
    """Why there is no result, in a line for the model."""


@dataclass(frozen=True, slots=True)
class Table:
    """The result of a query.

    Example:
        Table(("carrier",), (("UA",),))
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    more: bool = False
    """Whether there were more rows than were asked for."""


class Worker:
    """One process, one query at a time."""

    def __init__(self, path: Path, memory: int) -> None:
        command = [sys.executable, "-I", "-S", query_worker.__file__, str(path), str(memory)]
        self.process = start_child(command, {}, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer; None if the process ended or had to be killed."""
        try:
            pipe(self.process.stdin).write(json.dumps(request).encode() + b"\n")
            pipe(self.process.stdin).flush()
            line = self.read_line(time.monotonic() + seconds)
            answer = json.loads(line) if line else None
        except (OSError, ValueError):
            answer = None
        if not isinstance(answer, dict):
            self.close()
            return None
        return answer

    def read_line(self, end: float) -> bytes:
        """A line of output; empty if it does not come in time."""
        output = pipe(self.process.stdout)
        parts: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    return b""
                part = output.read1(1 << 16)  # type: ignore[attr-defined]
                if not part:
                    return b""
                parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        kill_child(self.process)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # unwritten data has no reader any more
                    continue


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


class Database:
    """A file that is only ever read, by a few workers; may be asked from any thread.

    Example:
        Database(path).query("SELECT name FROM airlines WHERE carrier = 'UA'")
    """

    def __init__(
        self,
        path: Path,
        *,
        workers: int = 2,
        memory: int = MEMORY,
        seconds: float = SECONDS,
        steps: int = STEPS,
        patience: float = PATIENCE,
    ) -> None:
        self.path = path
        self.memory = memory
        self.seconds = seconds
        self.steps = steps
        self.patience = patience
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()  # None: one that is still to be started
        for _ in range(workers):
            self.idle.put(None)

    def query(self, sql: str, *, rows: int = 20) -> Table:
        """The first rows of the result; raises QueryError."""
        worker = self.idle.get()
        answer = None
        try:
            worker = worker or Worker(self.path, self.memory)
            request = {"sql": sql, "rows": rows, "steps": self.steps, "seconds": self.seconds}
            answer = worker.ask(request, self.patience)
        finally:
            self.idle.put(worker if answer is not None else None)
        if answer is None:
            raise QueryError("the query takes too long or too much memory and was stopped")
        if "error" in answer:
            raise QueryError(str(answer["error"]))
        return Table(tuple(answer["columns"]), tuple(map(tuple, answer["rows"])), bool(answer["more"]))

    def close(self) -> None:
        """End the workers that are idle; the next query starts one again."""
        for _ in range(self.idle.qsize()):
            worker = self.idle.get()
            if worker is not None:
                worker.close()
            self.idle.put(None)
