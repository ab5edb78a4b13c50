"""Environments that each run in a separate process: for libraries with global random numbers, module state, or crashes.

A library is imported once, in a process that does nothing else (zygote.py), and every attempt is a fork of that
process. A fork takes milliseconds and about a megabyte and sees nothing of other attempts; a crash or a time-out costs
one attempt.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache, wraps
from itertools import count
from random import Random
from typing import Any, ClassVar

from turnwise.envs.base import Reply
from turnwise.envs.child_process import end_child, start_child
from turnwise.envs.isolation.json_wire import (
    message_of,
    packed,
    packed_message,
    packed_task,
    receive,
    receive_async,
    reply_of,
    send,
)
from turnwise.envs.isolation.variables import passed_on
from turnwise.envs.isolation.zygote import FORK, KILL, order_of
from turnwise.envs.raised import carrying, unpacked
from turnwise.messages import Message
from turnwise.types import Task

START = "from turnwise.envs.isolation.zygote import main; main()"
SURROUNDINGS = {
    "PYTHONHASHSEED": "0",  # some libraries write down sets
    "OMP_NUM_THREADS": "1",  # a process with threads cannot be forked safely
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
    "SDL_VIDEODRIVER": "dummy",
}
GRACE = 5.0
"""Seconds that a process may take to end by itself."""
EXPERT_SECONDS = 60.0
"""Seconds that an expert may take: the run waits for it."""
CHECK_SECONDS = 300.0
"""Seconds that the import of a library and the check of a name may take."""


class ProcessFailure(RuntimeError):
    """The process of an environment has ended, or the environment raised in it."""


class ForkServer:
    """The process that the environments of one adapter are forked from. If it has died, a new one starts."""

    def __init__(self, target: str, variables: tuple[str, ...] = ()) -> None:
        self.target = target
        self.variables = variables
        self.lock = threading.Lock()
        self.numbers = count()
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None

    def fork(self, name: str) -> tuple[int, socket.socket]:
        """The number of a new child and a socket to it. The child answers as soon as the library is imported."""
        near_end, far_end = socket.socketpair()
        try:
            with self.lock, far_end:
                if self.process is None or self.process.poll() is not None:
                    self.start()
                number = next(self.numbers)
                order = order_of(FORK, number, name)
                try:
                    socket.send_fds(self.living, [order], [far_end.fileno()])
                except OSError:  # the fork server has just died
                    self.start()
                    socket.send_fds(self.living, [order], [far_end.fileno()])
        except BaseException:
            near_end.close()
            raise
        return number, near_end

    def kill(self, number: int) -> None:
        """Kill a child."""
        with self.lock, suppress(OSError):
            self.living.sendall(order_of(KILL, number))

    @property
    def living(self) -> socket.socket:
        assert self.line is not None
        return self.line

    def start(self) -> None:
        self.end()
        self.line, far_end = socket.socketpair()
        with far_end:
            paths = os.pathsep.join(path for path in sys.path if path)
            command = [sys.executable, "-c", START, self.target, str(far_end.fileno())]
            variables = {**passed_on(self.variables), **SURROUNDINGS, "PYTHONPATH": paths}
            self.process = start_child(command, variables, pass_fds=[far_end.fileno()])

    def end(self) -> None:
        """End the process and its children."""
        if self.line is not None:
            self.line.close()
        if self.process is not None:
            end_child(self.process, GRACE)
        self.process = self.line = None


def fork_server_of(target: str, variables: tuple[str, ...] = ()) -> ForkServer:
    """The fork server of an adapter. Its processes get these environment variables besides the usual ones."""
    return cached_fork_server(target, variables)


@cache
def cached_fork_server(target: str, variables: tuple[str, ...]) -> ForkServer:
    fork_server = ForkServer(target, variables)
    atexit.register(fork_server.end)
    return fork_server


class Isolated:
    """`Environment` in a separate process. A process that hangs is killed when the environment is closed. If a process
    dies, its attempt fails, and the next attempt gets another process."""

    costs_process: ClassVar[bool] = True
    kind: ClassVar[Any]
    """The adapter's class for one environment of the library."""
    target: ClassVar[str]
    """Where the process finds the adapter's class."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.number = -1
        self.line: socket.socket | None = None
        self.busy = False

    @property
    def fork_server(self) -> ForkServer:
        return fork_server_of(self.target, getattr(self.kind, "variables", ()))

    async def open(self, task: Task) -> Reply | None:
        self.number, self.line = self.fork_server.fork(self.kind.name)
        self.line.setblocking(False)
        return reply_of(await self.ask("open", self.settings, packed_task(task)))

    async def step(self, message: Message) -> Reply | None:
        return reply_of(await self.ask("step", packed_message(message)))

    async def close(self) -> Reply | None:
        """Close the environment if it still answers, and end its process in any case."""
        if self.line is None:
            return None
        try:
            return None if self.busy else reply_of(await self.ask("close"))
        finally:
            if self.busy:
                self.fork_server.kill(self.number)
            self.line.close()
            self.line = None

    async def ask(self, method: str, *arguments: Any) -> Any:
        """The result of a method in the process. A cancelled call leaves the process busy."""
        line, loop = self.line, asyncio.get_running_loop()
        assert line is not None, "it was not opened"
        self.busy = True
        try:
            await loop.sock_sendall(line, packed([method, arguments]))
            answer = await receive_async(line)
        except (EOFError, OSError):
            raise ProcessFailure(f"the process of {self.kind.name} ended in the middle of {method}") from None
        self.busy = False
        return result_of(answer)

    def ask_expert(self, noise: float, random: Random) -> str | Message:
        """The next message of an expert."""
        assert self.line is not None, "it was not opened"
        self.busy = True
        answer = call_and_wait(self.line, EXPERT_SECONDS, "demonstrate", noise, random.getrandbits(63))
        self.line.setblocking(False)
        self.busy = False
        return answer if isinstance(answer, str) else message_of(answer)


def call_and_wait(line: socket.socket, seconds: float, method: str, *arguments: Any) -> Any:
    """The result of a method in a process; blocks until it arrives."""
    line.settimeout(seconds)
    try:
        send(line, [method, arguments])
        return result_of(receive(line))
    except (EOFError, OSError):
        raise ProcessFailure(f"the process of an environment gave no answer to {method}") from None


def result_of(answer: dict[str, Any]) -> Any:
    if "answer" in answer:
        return answer["answer"]
    error = ValueError(answer["mistake"]) if "mistake" in answer else ProcessFailure(answer["failure"])
    raise carrying(error, unpacked(answer["raised"]))


def isolate(kind: Any, target: str) -> type[Isolated]:
    """A class like `kind` that runs each attempt in a separate process. Settings and tasks are those of the adapter's
    class."""

    @wraps(kind.__init__)
    def __init__(self: Isolated, **settings: Any) -> None:
        Isolated.__init__(self, **settings)

    def check_settings(**settings: Any) -> None:
        check(target, kind.name, json.dumps(settings), getattr(kind, "variables", ()))

    members = {
        "__init__": __init__,
        "tasks": staticmethod(kind.tasks),
        "task_fields": kind.task_fields,
        "check_settings": staticmethod(check_settings),
        "kind": kind,
        "target": target,
    }
    for name in ("models", "heldout_settings"):
        if hasattr(kind, name):
            members[name] = staticmethod(getattr(kind, name))
    if kind.demonstrates():
        members["demonstrate"] = Isolated.ask_expert
    return type(kind.__name__, (Isolated,), members)


@cache
def check(target: str, name: str, settings: str, variables: tuple[str, ...] = ()) -> None:
    """ValueError if the library has no such environment, or cannot make it with these settings."""
    fork_server = fork_server_of(target, variables)
    number, line = fork_server.fork(name)
    with line:
        try:
            call_and_wait(line, CHECK_SECONDS, "check", json.loads(settings))
        except ProcessFailure as failure:
            raise ValueError(f"{name} cannot be opened: {str(failure)[:300]}") from None
        finally:
            fork_server.kill(number)
