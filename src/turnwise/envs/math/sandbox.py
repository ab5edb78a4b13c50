"""A sandbox for Python that somebody hostile may have written: a jailed process per program, gone when it ends."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

from turnwise.envs.child_process import start_child
from turnwise.envs.math import jail as sandbox_jail
from turnwise.envs.tools import ToolBroken

NUMBERS = itertools.count(os.getpid() % 100_000 * 1000)
"""Different for sandboxes that run at the same time."""
AT_ONCE = 2 * (os.cpu_count() or 1)
running = threading.BoundedSemaphore(AT_ONCE)


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a program.

    Example:
        Ran("3\\n")
        Ran("line 1: ZeroDivisionError: division by zero\\n", failed=True)
    """

    output: str
    """All that it wrote, up to a limit."""
    failed: bool = False
    why: str = ""
    """Why it was stopped, in a line; empty if it ended by itself."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Limits of a program. What it writes it writes nowhere, and what it starts ends with it.

    Example:
        Sandbox().run("print(2 ** 64)").output
    """

    memory: int = 256 << 20
    """Bytes."""
    seconds: float = 5.0
    """Of work."""
    patience: float = 20.0
    """Seconds of the clock: a program may sleep, and others may be on the machine."""
    processes: int = 1
    """Processes and threads, the first one included; each may have the memory above."""
    longest: int = 4000
    """Bytes of output that are kept."""
    most: int = 1 << 20
    """Bytes of output after which the program is stopped."""
    python: str = getattr(sys, "_base_executable", None) or sys.executable

    def run(self, code: str) -> Ran:
        """Run a program to its end. Raises ToolBroken if this machine has no sandbox."""
        with running:
            answer = self.answer(code)
        if "refused" in answer:
            raise ToolBroken(f"there is no sandbox on this machine: {answer['refused']}")
        said, ended = str(answer["said"]), int(answer["ended"])
        if answer["size"] > self.longest:
            said += f"\n... cut after {self.longest} of {answer['size']} bytes"
        return Ran(said, failed=ended != 0 or bool(answer["why"]), why=self.in_words(str(answer["why"]), ended))

    def answer(self, code: str) -> dict[str, Any]:
        """The answer of the supervisor process."""
        request = {
            name: getattr(self, name) for name in ("memory", "seconds", "patience", "processes", "longest", "most")
        }
        line = json.dumps({**request, "code": code, "number": next(NUMBERS) % 100_000_000}) + "\n"
        command = [self.python, "-I", "-S", sandbox_jail.__file__]
        process = start_child(command, {}, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process:
                process.stdin.write(line.encode())
                process.stdin.flush()
                # Meanwhile stdin stays open: where it closes, the program is stopped.
                answer = json.loads(process.stdout.read())
        except (OSError, ValueError) as error:
            raise ToolBroken(f"the sandbox ended without an answer: {error}") from None
        assert isinstance(answer, dict)
        return answer

    def in_words(self, why: str, ended: int) -> str:
        """Why a program was stopped."""
        if why == "time":
            return f"stopped after {self.patience:g} seconds"
        if why == "output":
            return f"stopped after {self.most} bytes of output"
        if ended == -9 and not why:
            return f"stopped after {self.seconds:g} seconds of work, or by a lack of memory"
        return f"ended by signal {-ended}" if ended < 0 else ""


@cache
def check_sandbox() -> None:
    """ValueError, in one line, if this machine has no working sandbox."""
    if not sys.platform.startswith("linux"):
        raise ValueError("the Python tool needs Linux; set env.settings.python = false")
    try:
        ran = Sandbox(patience=120.0).run("print(6 * 7)")
    except ToolBroken as error:
        raise ValueError(f"{error}; set env.settings.python = false") from None
    if ran.output != "42\n":
        raise ValueError(
            f"the sandbox does not work here ({ran.why or ran.output[:200]}); set env.settings.python = false"
        )
