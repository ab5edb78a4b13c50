"""The run's side of the processes that play environments of verifiers: one process per environment, for all attempts.

The process runs verifiers_player.py in the user's Python that has the library. It ends with the run. If it dies, the
attempts that it played fail, and the next attempt starts a new process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from turnwise.envs.child_process import end_child, start_child
from turnwise.envs.isolation.variables import passed_on
from turnwise.types import Task

PROGRAM = Path(__file__).with_name("verifiers_player.py")
LONGEST = 1 << 26
"""The longest accepted line, in bytes."""
TAIL = 1 << 14
"""How many bytes of the end of stderr are kept."""
GRACE = 10.0
"""Seconds that the process has to obey a cancel, to read an order, and to end."""
LOAD_SECONDS = 600.0
"""How long the import of the library, an environment and its rows may take."""
OURS = "127.0.0.1,localhost,::1"
"""Addresses that are reached without a proxy."""


class PlayerFailure(RuntimeError):
    """The process has ended, or an order failed in it."""


class PlayerProcess:
    """One process, from its start to its end."""

    def __init__(self, python: str, name: str, options: Mapping[str, Any], variables: Sequence[str] = ()) -> None:
        self.name = name
        self.numbers = count()
        self.waiting: dict[int, Future[Any]] = {}
        self.lock = threading.Lock()
        self.fault = ""
        """Why it cannot load the environment; empty if it has not reported a mistake."""
        self.complaints = b""
        self.is_ending = False
        self.line, other_end = socket.socketpair()
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GRACE), 0))
        with other_end:
            self.process = start_child(
                [python, str(PROGRAM), str(other_end.fileno())],
                {**passed_on(variables), **without_proxy(), "PYTHONUNBUFFERED": "1"},
                pass_fds=[other_end.fileno()],
                stderr=subprocess.PIPE,
            )
        self.loaded, _ = self.ask("load", name=name, options=dict(options))
        for work in (self.listen, self.overhear):
            threading.Thread(target=work, daemon=True, name=f"verifiers:{name}").start()

    @property
    def is_alive(self) -> bool:
        return not self.is_ending and self.process.poll() is None

    def ask(self, kind: str, **order: Any) -> tuple[Future[Any], int]:
        """The future answer to an order, and the order's number."""
        number, answer = next(self.numbers), Future[Any]()
        self.waiting[number] = answer
        try:
            self.send({"id": number, "do": kind, **order})
        except OSError:  # the process has ended or does not read
            self.process.kill()
            self.waiting.pop(number, None)
            raise PlayerFailure(self.obituary()) from None
        return answer, number

    def cancel(self, number: int) -> None:
        """Cancel an order. If the process does not confirm in time, something blocks it, and it is ended."""

        def expect() -> None:
            if number in self.waiting:
                self.end()

        timer = threading.Timer(GRACE, expect)
        timer.daemon = True
        timer.start()
        with contextlib.suppress(OSError):  # the process has ended
            self.send({"id": number, "do": "cancel"})

    def send(self, order: Mapping[str, Any]) -> None:
        with self.lock:
            self.line.sendall(json.dumps(order).encode() + b"\n")

    def end(self) -> None:
        """Ask the process to end with everything it started; kill it if it does not."""
        self.is_ending = True
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)
        end_child(self.process, GRACE)

    # ------------------------------------------------------------ threads

    def listen(self) -> None:
        """Hand out answers until the socket is closed or a line is invalid."""
        with contextlib.suppress(OSError, ValueError, RecursionError), self.line.makefile("rb") as lines:
            while (line := lines.readline(LONGEST)).endswith(b"\n"):
                number, answer = answer_in(line)
                if (future := self.waiting.pop(number, None)) is not None:
                    self.hand_over(future, answer)
        self.end()
        while self.waiting:
            _, future = self.waiting.popitem()
            self.hand_over(future, {"failure": self.obituary()})
        self.line.close()

    def hand_over(self, future: Future[Any], answer: Mapping[str, Any]) -> None:
        if "mistake" in answer:
            self.fault = str(answer["mistake"])
        if not future.set_running_or_notify_cancel():
            return
        if "answer" in answer:
            future.set_result(answer["answer"])
        else:
            future.set_exception(PlayerFailure(self.fault or str(answer.get("failure"))))

    def overhear(self) -> None:
        """Keep the end of stderr, which says why the process died."""
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            while part := os.read(stream.fileno(), TAIL):
                self.complaints = (self.complaints + part)[-TAIL:]

    def obituary(self) -> str:
        lines = self.complaints.decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return self.fault or f"the process of verifiers:{self.name} ended{f': {last[:300]}' if last else ''}"


def answer_in(line: bytes) -> tuple[int, dict[str, Any]]:
    """(number of the order, its answer); ValueError if the line is not an answer."""
    answer = json.loads(line)
    if not isinstance(answer, dict) or type(answer.get("id")) is not int:
        raise ValueError(f"the process wrote a line that is not an answer: {line[:100]!r}")
    return answer["id"], answer


def without_proxy() -> dict[str, str]:
    return {name: ",".join(filter(None, [os.environ.get(name), OURS])) for name in ("NO_PROXY", "no_proxy")}


class Player:
    """Plays one environment of the library, for all attempts at it."""

    def __init__(self, python: str, name: str, options: Mapping[str, Any], variables: Sequence[str] = ()) -> None:
        self.python = python
        self.name = name
        self.options = options
        self.variables = variables
        self.lock = threading.Lock()
        self.process: PlayerProcess | None = None

    def living(self) -> PlayerProcess:
        with self.lock:
            if self.process is None or not self.process.is_alive:
                self.process = PlayerProcess(self.python, self.name, self.options, self.variables)
            return self.process

    def check(self) -> None:
        """ValueError if the process cannot load the environment."""
        try:
            self.living().loaded.result(LOAD_SECONDS)
        except (PlayerFailure, TimeoutError, OSError) as error:
            raise ValueError(f"verifiers:{self.name} cannot be loaded by {self.python}: {error or 'timeout'}") from None

    def rows(self, start: int, size: int) -> list[dict[str, Any]]:
        """`size` rows of the taskset from `start`; fewer at its end."""
        try:
            answer, _ = self.living().ask("rows", start=start, count=size)
            rows = answer.result(LOAD_SECONDS)
        except (PlayerFailure, TimeoutError) as error:
            raise ValueError(f"verifiers:{self.name} gives no tasks: {error or 'timeout'}") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"verifiers:{self.name} gives tasks that are not JSON objects")
        return rows

    async def play(self, task: Task, base_url: str, api_key: str, model: str) -> Any:
        """Play an episode; return the process's answer. Cancelling this call cancels the episode in the process too."""
        process = self.living()
        row = dict(task.data)
        answer, number = process.ask("play", row=row, base_url=base_url, api_key=api_key, model=model)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            process.cancel(number)
            raise

    def end(self) -> None:
        if self.process is not None:
            self.process.end()


@cache
def player_of(python: str, name: str, options: str, variables: tuple[str, ...] = ()) -> Player:
    """The player of an environment with these options, which are JSON."""
    player = Player(python, name, json.loads(options), variables)
    atexit.register(player.end)
    return player
