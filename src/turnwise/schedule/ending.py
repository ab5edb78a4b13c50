"""The end of the process when nothing else ends it: at once, and without leaving anything behind."""

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
"""Seconds that something has which may wait for a lock that nobody gives back."""
SHOW_CURSOR = b"\x1b[?25h"


def end_at_once(code: int, last_words: Callable[[], object] = lambda: None) -> Never:
    """End this process and those it has started, from whichever thread. What it has in shared memory is removed, and
    the terminal is as it was; nothing is closed in order."""
    briefly(last_words)
    briefly(flush)
    briefly(remove_shared_memory)
    kill_children()
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        with suppress(OSError):
            os.write(sys.__stdout__.fileno(), SHOW_CURSOR)
    os._exit(code)


def end_within(seconds: float, code: int) -> None:
    """Have the process end by then, whatever threads and tasks hold it; at once where tasks were left behind, which
    would be taken apart in the middle of what they do."""
    if LEFT:
        end_at_once(code)
    timer = threading.Timer(seconds, end_at_once, (code,))
    timer.daemon = True
    timer.start()


def briefly(act: Callable[[], object]) -> None:
    """Do something, or do not, but go on."""

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
    """Remove published weights, where this process has published some."""
    if (publishing := sys.modules.get("turnwise.weights.publisher")) is not None:
        publishing.close_all()


def kill_children() -> None:
    """End the processes that were started here, each with its group where it leads one. Those that they have started
    end with them; this is for those which do not look."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                with suppress(OSError):
                    (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
