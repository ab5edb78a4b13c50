"""A SQLite file for hostile queries. Worker processes with limits answer them.

A query that exploits a bug in SQLite can only break its worker. Each worker has a memory limit. A query that does not
stop can be killed.
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
"""Memory limit of a worker, in bytes."""
SECONDS = 10.0
"""Limit of CPU time for a query, which does not depend on the load of the machine."""
STEPS = 30_000_000
"""Limit of steps of SQLite's virtual machine: about two seconds."""
PATIENCE = 120.0
"""Limit of wall time, in seconds; then the worker is killed."""


class QueryError(Exception):
    """The query has no result. The message is for the model."""


@dataclass(frozen=True, slots=True)
class Table:
    """The result of a query.

    Example:
        Table(("carrier",), (("UA",),))
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    more: bool = False
    """Whether the query has more rows than the requested number."""


class Worker:
    """A process that answers one query at a time."""

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
                except OSError:  # the process that would read the buffered data has ended
                    continue


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


class Database:
    """A read-only file with a few workers. Any thread may query it.

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
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()  # None: a worker that is not started yet
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
        """End the idle workers; the next query starts a new one."""
        for _ in range(self.idle.qsize()):
            worker = self.idle.get()
            if worker is not None:
                worker.close()
            self.idle.put(None)
