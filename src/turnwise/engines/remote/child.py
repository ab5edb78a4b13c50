"""A child process that computes, gets no signals of the terminal, and ends with the process that started it.

It starts with a socket and gets the function to call over it. Nothing large is passed at the start itself, where nobody
would notice that the reader has died: multiprocessing's `start` writes all arguments into a pipe whose other end it
holds open itself.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnwise.engines.remote.fork_server import ForkedProcess, active_server

START = "from turnwise.engines.remote.child import main; main()"
SIZE = 8
"""Bytes that say how long a message is."""
POLL = 0.01
"""Seconds between two looks at whether a process has ended."""


class Child:
    """A process in its own session: a fork where `forked_children` says so, else a new interpreter. `work` gives it a
    function to call; `line` is the socket between the two.

    A signal to all processes of a terminal reaches the run only, which ends its children. However the run ends, the
    kernel closes its end of a pipe that the child watches.

    Example:
        child = Child("rank 0")
        child.work(serve, address)    # serve(line, address) in the child
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.line, child_line = socket.socketpair()
        watched, self.life = os.pipe()
        self.process: subprocess.Popen[bytes] | ForkedProcess
        server = active_server()
        try:
            start: Callable[[str, int, int], subprocess.Popen[bytes] | ForkedProcess]
            start = new_interpreter if server is None else server.fork
            self.process = start(name, child_line.fileno(), watched)
        except BaseException:
            self.line.close()
            os.close(self.life)
            raise
        finally:
            child_line.close()
            os.close(watched)

    def work(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have it call function(line, *arguments). Returns when the child has read that; OSError if it is dead."""
        data = pickle.dumps((function, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        self.line.sendall(len(data).to_bytes(SIZE, "little"))
        self.line.sendall(data)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it lives."""
        return self.process.poll()

    def end(self, seconds: float) -> None:
        """Wait for it to end by itself, which it does when its line is closed; kill it after so many seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        life, self.life = self.life, -1
        if life >= 0:
            os.close(life)

    async def ended(self, seconds: float) -> None:
        """`end` in an event loop, without a thread: one of the loop's pool stays for good once it has started."""
        deadline = time.monotonic() + seconds
        try:
            while self.code is None and time.monotonic() < deadline:
                await asyncio.sleep(POLL)
        finally:
            self.end(0.0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def new_interpreter(name: str, child_line: int, watched: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", START, name, str(child_line), str(watched)],
        pass_fds=[child_line, watched],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


# ---------------------------------------------------------------- the other process


def main() -> None:
    name, line, watched = sys.argv[1:]
    run(name, socket.socket(fileno=int(line)), int(watched))


def run(name: str, line: socket.socket, watched: int) -> None:
    """Call the function that arrives on the line. `ps` and `top` show the name."""
    with suppress(OSError):  # where there is no such file
        Path("/proc/self/comm").write_text(name)
    threading.Thread(target=end_with_parent, args=(watched,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    try:
        function, arguments = pickle.loads(exactly(line, int.from_bytes(exactly(line, SIZE), "little")))
    except (EOFError, OSError):
        os._exit(1)  # whoever started it has ended already
    function(line, *arguments)


def end_with_parent(watched: int) -> None:
    with suppress(OSError):
        os.read(watched, 1)
    os._exit(1)


def exactly(line: socket.socket, size: int) -> bytearray:
    """So many bytes of the line, without a second copy of them."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = line.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data
