"""A sandbox for hostile Python: one jailed process per program."""

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
    """Its output, cut at a limit."""
    failed: bool = False
    why: str = ""
    """Why it was stopped, in one line; empty if it ended by itself."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Limits of a program. It can write no file, and the processes that it starts end with it.

    Example:
        Sandbox().run("print(2 ** 64)").output
    """

    memory: int = 256 << 20
    """Memory of a process, in bytes."""
    seconds: float = 5.0
    """CPU time, in seconds."""
    patience: float = 20.0
    """Wall time, in seconds. It is longer because a program may sleep and the machine may be busy."""
    processes: int = 1
    """Processes and threads, including the first; each may use `memory` bytes."""
    longest: int = 4000
    """How many bytes of the output are kept."""
    most: int = 1 << 20
    """The program is stopped after this many bytes of output."""
    python: str = getattr(sys, "_base_executable", None) or sys.executable

    def run(self, code: str) -> Ran:
        """Run a program to its end. Raises ToolBroken if this machine has no sandbox."""
        with running:
            answer = self.answer(code)
        if "refused" in answer:
            raise ToolBroken(f"there is no sandbox on this machine: {answer['refused']}")
        output, ended = str(answer["said"]), int(answer["ended"])
        if answer["size"] > self.longest:
            output += f"\n... cut after {self.longest} of {answer['size']} bytes"
        return Ran(output, failed=ended != 0 or bool(answer["why"]), why=self.in_words(str(answer["why"]), ended))

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
                # Stdin stays open meanwhile: if it closes, the supervisor stops the program.
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
        result = Sandbox(patience=120.0).run("print(6 * 7)")
    except ToolBroken as error:
        raise ValueError(f"{error}; set env.settings.python = false") from None
    if result.output != "42\n":
        raise ValueError(
            f"the sandbox does not work here ({result.why or result.output[:200]}); set env.settings.python = false"
        )
