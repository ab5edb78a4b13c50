"""The last resort: end the process at once, without leaving children or shared memory behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Never

from turnwise.rollout.leaving import LEFT

MOMENT = 1.0
"""Seconds for an action that may wait for a lock that is never released."""
SHOW_CURSOR = b"\x1b[?25h"


def end_at_once(code: int, last_words: Callable[[], object] = lambda: None) -> Never:
    """End this process and its children, from any thread. Its shared memory is removed and the terminal restored;
    nothing else is closed."""
    briefly(last_words)
    briefly(flush)
    briefly(remove_shared_memory)
    kill_children()
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        with suppress(OSError):
            os.write(sys.__stdout__.fileno(), SHOW_CURSOR)
    os._exit(code)


def end_within(seconds: float, code: int) -> None:
    """End the process after that time, whatever threads and tasks still run; at once if tasks were left behind, because
    interpreter shutdown would tear them apart."""
    if LEFT:
        end_at_once(code)
    timer = threading.Timer(seconds, end_at_once, (code,))
    timer.daemon = True
    timer.start()


def briefly(act: Callable[[], object]) -> None:
    """Try to do something for a moment, then go on."""

    def work() -> None:
        with suppress(Exception):
            act()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(MOMENT)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def remove_shared_memory() -> None:
    """Remove published weights, if this process has published any."""
    if (publishing := sys.modules.get("turnwise.weights.publisher")) is not None:
        publishing.close_all()


def kill_children() -> None:
    """Kill the children of this process, each with its process group if it leads one. Most children end by
    themselves when this process does; this is for those that do not notice."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                with suppress(OSError):
                    (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
