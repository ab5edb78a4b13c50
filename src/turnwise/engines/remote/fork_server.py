"""A process that has imported what children need and forks them, so that a child starts in milliseconds.

A new interpreter takes seconds of CPU time to import torch and transformers, for every rank, every engine and every
restart of one. The server imports once. It has one thread, which makes forking safe, touches no GPU, and ends with the
process that started it; its children end with it. Their memory of the imports is shared.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Never

from turnwise.frames import receive_exactly
from turnwise.pretrained import import_models

START = "from turnwise.engines.remote import child, fork_server; fork_server.main(child.run)"
HEADER = struct.Struct("<cII")
"""An order: its kind, the process it is about, and how many bytes follow."""
FORK, KILL = b"f", b"k"
PID, CODE = struct.Struct("<i"), struct.Struct("<i")
"""What is said of a child: its process at the start, and its exit code at the end, which is minus a signal's number."""
OUTPUTS = (1, 2)
"""Standard output and standard error."""
NUM_FDS = 5
"""Descriptors of a new child: its line, the pipe it watches, where the server says what became of it, its outputs."""
READ_AT_IMPORT = ("CUDA", "GOMP", "HF_", "KMP", "LD_", "MALLOC", "MKL", "NCCL", "OMP", "OPENBLAS", "PYTHON", "TORCH")
"""Beginnings of variables that libraries read while they are imported: with others of these, a child needs an
interpreter of its own."""
DIE_WITH_PARENT = 1
"""Linux's PR_SET_PDEATHSIG."""


class ChildServer:
    """The server as seen by the process that starts it, when the first child is asked for. It imports some modules.

    Example:
        with forked_children(["turnwise.cluster.rank"]):
            child = Child("rank 0")    # a fork of the server's process
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None
        self.variables: Mapping[str, str] = {}
        self.paths: list[str] = []

    def serves(self) -> bool:
        """Whether a child that starts now would find what it reads at import as the server did."""
        if self.process is None:
            return True
        same = read_at_import(self.variables) == read_at_import(os.environ)
        return same and self.paths == sys.path and self.process.poll() is None

    def fork(self, name: str, child_line: int, watched: int) -> ForkedProcess:
        """A child with descriptors of its line and of the pipe that it watches. It prints to where the run prints now,
        in the run's folder and with its variables."""
        line = self.line or self.open()
        told, telling = os.pipe()
        try:
            place = "\0".join([name, os.getcwd(), *(f"{key}={value}" for key, value in os.environ.items())])
            data = place.encode(errors="surrogateescape")
            socket.send_fds(line, [HEADER.pack(FORK, 0, len(data))], [child_line, watched, telling, *OUTPUTS])
            line.sendall(data)
        except BaseException:
            os.close(told)
            raise
        finally:
            os.close(telling)
        return ForkedProcess(self, told)

    def open(self) -> socket.socket:
        self.line, far_end = socket.socketpair()
        self.variables, self.paths = dict(os.environ), list(sys.path)
        with far_end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, str(far_end.fileno()), *self.modules],
                pass_fds=[far_end.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self.line

    def kill(self, pid: int) -> None:
        """Kill a child that has not ended; the server knows which have, so no other process is hit."""
        if self.line is not None:
            with suppress(OSError):  # it is dead, and its children with it
                self.line.sendall(HEADER.pack(KILL, pid, 0))

    def close(self) -> None:
        """End the server and the children it still has."""
        if self.line is not None:
            self.line.close()
        if self.process is not None:
            self.process.wait()
        self.line = self.process = None


class ForkedProcess:
    """A child of the server, with those methods of `subprocess.Popen` that are needed."""

    def __init__(self, server: ChildServer, told: int) -> None:
        self.server = server
        self.told = told
        self.returncode: int | None = None
        said = os.read(told, PID.size)
        if len(said) < PID.size:
            os.close(told)
            raise OSError("the process that children are forked from has ended; what it printed says why")
        (self.pid,) = PID.unpack(said)

    def poll(self) -> int | None:
        return self.look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self.look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def look(self, seconds: float | None) -> int | None:
        """Its exit code, if it has ended or does so within some seconds."""
        if self.returncode is None and select.select([self.told], [], [], seconds)[0]:
            said = os.read(self.told, CODE.size)
            # Without a word the server itself has ended, which kills its children.
            self.returncode = CODE.unpack(said)[0] if len(said) == CODE.size else -signal.SIGKILL
            os.close(self.told)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            self.server.kill(self.pid)

    def __del__(self) -> None:
        if self.returncode is None:
            with suppress(AttributeError, OSError):
                os.close(self.told)


def read_at_import(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(READ_AT_IMPORT)}


ACTIVE: list[ChildServer] = []
"""The server that children are forked from; none where each is an interpreter of its own."""


@contextmanager
def forked_children(modules: Sequence[str]) -> Iterator[None]:
    """Fork the children that start within from a process with these modules, where the system can: Linux ends them with
    that process. Within another of its kind it changes nothing."""
    if ACTIVE or not sys.platform.startswith("linux"):
        yield
        return
    ACTIVE.append(ChildServer(modules))
    try:
        yield
    finally:
        ACTIVE.pop().close()


def active_server() -> ChildServer | None:
    """The server that can fork a child now."""
    return ACTIVE[0] if ACTIVE and ACTIVE[0].serves() else None


# ---------------------------------------------------------------- the server


Run = Callable[[str, socket.socket, int], None]
"""What a child does: its name, its line, and the pipe that it watches."""


def main(run: Run) -> Never:
    """Import modules, and fork a child for every order, until the run has ended. A child calls `run`."""
    line = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        if module.startswith("transformers."):
            import_models()
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared with the children
    Forks(line, run).serve()


class Forks:
    """The children, by process. The server reaps them itself, so a number always means the same process."""

    def __init__(self, line: socket.socket, run: Run) -> None:
        self.line = line
        self.run = run
        self.prctl = ctypes.CDLL(None).prctl
        self.pid = os.getpid()
        self.telling: dict[int, int] = {}
        """Where the run is told of each."""
        self.woken, waking = socket.socketpair()
        waking.setblocking(False)
        self.waking = waking
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)

    def serve(self) -> Never:
        while True:
            ready, _, _ = select.select([self.line, self.woken], [], [])
            if self.woken in ready:
                self.woken.recv(4096)
                self.reap()
            if self.line in ready:
                self.obey()

    def obey(self) -> None:
        try:
            head, fds, _, _ = socket.recv_fds(self.line, HEADER.size, NUM_FDS)
            head += receive_exactly(self.line, HEADER.size - len(head))
            kind, pid, size = HEADER.unpack(head)
            place = receive_exactly(self.line, size).decode(errors="surrogateescape")
        except (EOFError, OSError):
            os._exit(0)  # the run has ended
        if kind == FORK:
            self.fork(fds, place)
        elif pid in self.telling:
            os.kill(pid, signal.SIGKILL)

    def fork(self, fds: Sequence[int], place: str) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                name = self.become_child(fds, place)
                self.run(name, socket.socket(fileno=fds[0]), fds[1])
                code = 0
            except SystemExit as ending:
                code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                leave(code)
        os.write(fds[2], PID.pack(pid))
        self.telling[pid] = fds[2]
        for other in (*fds[:2], *fds[3:]):
            os.close(other)

    def become_child(self, fds: Sequence[int], place: str) -> str:
        """Leave what is the server's, and take the run's folder, variables and outputs. Returns the child's name."""
        os.setsid()
        self.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != self.pid:  # the server ended before the prctl
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for own in (self.line, self.woken, self.waking):
            own.close()
        for other in (fds[2], *self.telling.values()):
            os.close(other)
        for given, output in zip(fds[3:], OUTPUTS, strict=True):
            os.dup2(given, output)
            os.close(given)
        own_name, folder, *variables = place.split("\0")
        with suppress(OSError):  # it was deleted
            os.chdir(folder)
        os.environ.clear()
        os.environ.update({name: value for name, _, value in (one.partition("=") for one in variables)})
        return own_name

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                pid, status = ended
                told = self.telling.pop(pid)
                with suppress(OSError):  # nobody listens any more
                    os.write(told, CODE.pack(os.waitstatus_to_exitcode(status)))
                os.close(told)


def leave(code: int) -> Never:
    """End a fork as an interpreter of its own would end, without what the server would do at its end."""
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
