"""The process that environments of a library are forked from. It imports the library and does nothing else with it, so
every attempt begins with the same modules and the same random numbers, whatever earlier attempts did in their forks.

It has one thread, which makes forking safe. It ends with the process that started it, and its children end with it.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import os
import random
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Never

from turnwise.envs.isolation.json_wire import message_of, packed_message, packed_reply, receive, send, task_of
from turnwise.envs.raised import Raised, error_line
from turnwise.frames import receive_exactly
from turnwise.messages import Message

ORDER = 11
"""Bytes of an order: the command, the number of the child, and the length of the name that follows."""
FORK, KILL = b"f", b"k"
DIE_WITH_PARENT = 1
"""Linux's PR_SET_PDEATHSIG."""


def main() -> None:
    """Fork a child for every socket that arrives, until the connection ends."""
    Zygote(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))).run()


def order_of(kind: bytes, number: int, name: str = "") -> bytes:
    """The bytes of an order: fork or kill the child with this number, for the environment of this name."""
    return kind + number.to_bytes(8, "little") + len(name.encode()).to_bytes(2, "little") + name.encode()


class Zygote:
    """Keeps the children by number. It reaps them itself, so a number always means the same process."""

    def __init__(self, target: str, line: socket.socket) -> None:
        self.target = target
        self.line = line
        self.prctl = getattr(ctypes.CDLL(None), "prctl", None)
        self.pid = os.getpid()
        self.kinds: dict[str, tuple[Any, str]] = {}
        self.children: dict[int, int] = {}
        self.woken, self.waking = os.pipe()
        os.set_blocking(self.waking, False)
        os.set_blocking(self.woken, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.waking, warn_on_full_buffer=False)

    def run(self) -> Never:
        while True:
            ready, _, _ = select.select([self.line.fileno(), self.woken], [], [])
            if self.woken in ready:
                self.reap()
            if self.line.fileno() in ready:
                self.obey()

    def obey(self) -> None:
        order, sockets, _, _ = socket.recv_fds(self.line, ORDER, 1)
        order += self.read_exactly(ORDER - len(order))
        number = int.from_bytes(order[1:9], "little")
        name = self.read_exactly(int.from_bytes(order[9:], "little")).decode()
        if order[:1] == FORK:
            self.fork(number, sockets[0], *self.prepared(name))
        elif (pid := self.children.get(number)) is not None:
            os.kill(pid, signal.SIGKILL)

    def read_exactly(self, size: int) -> bytes:
        """The next bytes of the socket; the process ends when the socket is closed."""
        try:
            return receive_exactly(self.line, size)
        except (EOFError, OSError):
            os._exit(0)

    def prepared(self, name: str) -> tuple[Any, str]:
        """The adapter's class with all its imports done, or why that failed."""
        if name not in self.kinds:
            try:
                kind = named(class_of(self.target), name)
                kind.warm()
                importlib.import_module("numpy.random")  # numpy imports it on first use, which would be in every child
                self.kinds[name] = kind, ""
            except BaseException as error:  # every caller of this environment gets the error
                self.kinds[name] = None, error_line(error)
            gc.collect()
            gc.freeze()  # pages that the collector does not touch stay shared with the children
        return self.kinds[name]

    def fork(self, number: int, child_end: int, kind: Any, fault: str) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self.become_child()
                serve(kind, fault, socket.socket(fileno=child_end))
            finally:
                os._exit(0)
        self.children[number] = pid
        os.close(child_end)

    def become_child(self) -> None:
        if self.prctl is not None:
            self.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != self.pid:  # the parent died before the prctl
            os._exit(0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for open_one in (self.woken, self.waking):
            os.close(open_one)
        self.line.close()

    def reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self.woken, 4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self.children = {number: pid for number, pid in self.children.items() if pid != ended}


# ---------------------------------------------------------------- a child


def serve(kind: Any, fault: str, line: socket.socket) -> None:
    """Answer the calls of one attempt until its socket is closed."""
    forked = ForkedEnvironment(kind)
    with suppress(EOFError, OSError):
        while True:
            method, arguments = receive(line)
            try:
                if fault:
                    raise RuntimeError(fault)
                answer = {"answer": getattr(forked, method)(*arguments)}
            except ValueError as error:
                answer = {"mistake": error_line(error, with_kind=False), "raised": Raised.of(error).packed()}
            except BaseException as error:
                answer = {"failure": error_line(error), "raised": Raised.of(error).packed()}
            send(line, answer)


class ForkedEnvironment:
    """The calls that one environment answers; arguments and answers are JSON."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.environment: Any = None

    def check(self, settings: dict[str, Any]) -> None:
        self.kind(**settings).check()

    def open(self, settings: dict[str, Any], task: dict[str, Any]) -> Any:
        seed_everything(task["id"])
        self.environment = self.kind(**settings)
        return packed_reply(self.environment.open(task_of(task)))

    def step(self, message: dict[str, Any]) -> Any:
        return packed_reply(self.environment.step(message_of(message)))

    def close(self) -> Any:
        return packed_reply(self.environment.close())

    def demonstrate(self, noise: float, seed: int) -> Any:
        message = self.environment.demonstrate(noise, random.Random(seed))
        return packed_message(message) if isinstance(message, Message) else str(message)


def seed_everything(text: str) -> None:
    """Seed the global random generators from the task alone."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
    random.seed(seed)
    sys.modules["numpy.random"].seed(seed)


def class_of(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def named(kind: Any, name: str) -> Any:
    """The adapter's class for one of the library's environments."""
    return type(kind.__name__, (kind,), {"name": name})
