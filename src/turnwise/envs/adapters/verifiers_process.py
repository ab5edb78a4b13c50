"""The process that plays environments of verifiers, seen from the run: one for each environment, for all attempts.

It is verifiers_player.py in the user's Python that has the library. It ends with the run. Where it dies, the attempts
that it played have failed, and the next one starts another.
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
"""Bytes of a line that are believed."""
TAIL = 1 << 14
"""Bytes of what the process complains that are kept."""
GRACE = 10.0
"""Seconds in which it must obey a cancel, read what it is sent, and end."""
LOAD_SECONDS = 600.0
"""How long the import of the library, an environment and its rows may take."""
OURS = "127.0.0.1,localhost,::1"
"""Where no proxy is asked for."""


class PlayerFailure(RuntimeError):
    """The process has ended, or what it was asked for has failed there."""


class PlayerProcess:
    """One life of the process."""

    def __init__(self, python: str, name: str, options: Mapping[str, Any], variables: Sequence[str] = ()) -> None:
        self.name = name
        self.numbers = count()
        self.waiting: dict[int, Future[Any]] = {}
        self.lock = threading.Lock()
        self.fault = ""
        """Why it cannot play, where it has said so."""
        self.complaints = b""
        self.is_ending = False
        self.line, there = socket.socketpair()
        self.line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GRACE), 0))
        with there:
            self.process = start_child(
                [python, str(PROGRAM), str(there.fileno())],
                {**passed_on(variables), **without_proxy(), "PYTHONUNBUFFERED": "1"},
                pass_fds=[there.fileno()],
                stderr=subprocess.PIPE,
            )
        self.loaded, _ = self.ask("load", name=name, options=dict(options))
        for work in (self.listen, self.overhear):
            threading.Thread(target=work, daemon=True, name=f"verifiers:{name}").start()

    @property
    def is_alive(self) -> bool:
        return not self.is_ending and self.process.poll() is None

    def ask(self, kind: str, **order: Any) -> tuple[Future[Any], int]:
        """What an order will come to, and its number."""
        number, answer = next(self.numbers), Future[Any]()
        self.waiting[number] = answer
        try:
            self.send({"id": number, "do": kind, **order})
        except OSError:  # it has gone, or stopped reading
            self.process.kill()
            self.waiting.pop(number, None)
            raise PlayerFailure(self.obituary()) from None
        return answer, number

    def cancel(self, number: int) -> None:
        """Give up an order. A process that does not let go of it in time is held up by something, and ends."""

        def expect() -> None:
            if number in self.waiting:
                self.end()

        timer = threading.Timer(GRACE, expect)
        timer.daemon = True
        timer.start()
        with contextlib.suppress(OSError):  # it has gone
            self.send({"id": number, "do": "cancel"})

    def send(self, order: Mapping[str, Any]) -> None:
        with self.lock:
            self.line.sendall(json.dumps(order).encode() + b"\n")

    def end(self) -> None:
        """Have it let go of everything, what it started too, and end; kill it where it does not."""
        self.is_ending = True
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)
        end_child(self.process, GRACE)

    # ------------------------------------------------------------ threads

    def listen(self) -> None:
        """Hand out what it says until it says no more, or nonsense."""
        with contextlib.suppress(OSError, ValueError, RecursionError), self.line.makefile("rb") as lines:
            while (line := lines.readline(LONGEST)).endswith(b"\n"):
                number, said = answer_in(line)
                if (waits := self.waiting.pop(number, None)) is not None:
                    self.hand_over(waits, said)
        self.end()
        while self.waiting:
            _, waits = self.waiting.popitem()
            self.hand_over(waits, {"failure": self.obituary()})
        self.line.close()

    def hand_over(self, waits: Future[Any], said: Mapping[str, Any]) -> None:
        if "mistake" in said:
            self.fault = str(said["mistake"])
        if not waits.set_running_or_notify_cancel():
            return
        if "answer" in said:
            waits.set_result(said["answer"])
        else:
            waits.set_exception(PlayerFailure(self.fault or str(said.get("failure"))))

    def overhear(self) -> None:
        """Keep the end of what it complains, which says why it died."""
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            while part := os.read(stream.fileno(), TAIL):
                self.complaints = (self.complaints + part)[-TAIL:]

    def obituary(self) -> str:
        lines = self.complaints.decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return self.fault or f"the process of verifiers:{self.name} ended{f': {last[:300]}' if last else ''}"


def answer_in(line: bytes) -> tuple[int, dict[str, Any]]:
    """(number of the order, what it came to); ValueError where a line is neither."""
    said = json.loads(line)
    if not isinstance(said, dict) or type(said.get("id")) is not int:
        raise ValueError("the process says nonsense")
    return said["id"], said


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
        """ValueError where the environment cannot be loaded there."""
        try:
            self.living().loaded.result(LOAD_SECONDS)
        except (PlayerFailure, TimeoutError, OSError) as error:
            raise ValueError(f"verifiers:{self.name} cannot be loaded by {self.python}: {error or 'timeout'}") from None

    def rows(self, start: int, size: int) -> list[dict[str, Any]]:
        """So many rows of its taskset from a place on; fewer where it ends."""
        try:
            answer, _ = self.living().ask("rows", start=start, count=size)
            rows = answer.result(LOAD_SECONDS)
        except (PlayerFailure, TimeoutError) as error:
            raise ValueError(f"verifiers:{self.name} gives no tasks: {error or 'timeout'}") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"verifiers:{self.name} gives tasks that are no objects")
        return rows

    async def play(self, task: Task, base_url: str, api_key: str, model: str) -> Any:
        """What an episode came to, as the process says; whoever gives up waiting ends it there too."""
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
    """The one that plays an environment with options, which are JSON."""
    player = Player(python, name, json.loads(options), variables)
    atexit.register(player.end)
    return player
