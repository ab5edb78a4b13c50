"""Signs of life of ranks. A call may take any time, so that only they tell a rank that computes from one that is
stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from math import inf
from multiprocessing.connection import Connection
from typing import Any

TICK = 1.0
"""Seconds between two signs of life, and between two looks for them."""
ANSWER_SECONDS = 60.0
"""How long a rank may give no sign of life during a call, unless a recipe says otherwise."""
BEAT = None
"""What a rank sends as a sign of life; no answer is that."""


class Silence:
    """For how long each rank has given no sign of life.

    Time in which this process itself stood still does not count: signs may have come meanwhile that nobody has read.

    Example:
        silence = Silence(60.0, range(2))
        silence.look(heard={0}, waiting={0, 1})    # None, or a rank that has been silent for more than 60 s
    """

    def __init__(self, limit: float, started: Collection[int]) -> None:
        """A rank that has not started counts from its first sign on: a start may take any time."""
        self.limit = limit
        self.seconds = dict.fromkeys(started, 0.0)
        self.looked = time.monotonic()

    def look(self, heard: Collection[int], waiting: Collection[int]) -> int | None:
        """A rank among those waited for that has been silent for too long."""
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, 2 * TICK), now
        for rank in waiting:
            self.seconds[rank] = 0.0 if rank in heard else self.seconds.get(rank, -inf) + passed
        return next((rank for rank in waiting if self.seconds[rank] > self.limit), None)


def silent_for(seconds: float) -> str:
    """Why a rank counts as lost."""
    return f"its process has given no sign of life for {seconds:g} s (cluster.answer_seconds)"


class BeatingLine(Connection):
    """A rank's end of its connection. A thread sends signs of life, from before the rank computes anything.

    Where nobody reads them for long, the thread waits for room; whoever calls the rank next reads them first.
    """

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self.sending = threading.Lock()
        threading.Thread(target=self.beat, name="signs of life", daemon=True).start()

    def send(self, obj: Any) -> None:
        with self.sending, ended_as_eof():
            super().send(obj)

    def recv(self) -> Any:
        with ended_as_eof():
            return super().recv()

    def beat(self) -> None:
        with suppress(EOFError, OSError):  # the run has ended, which the rank notices itself
            while True:
                self.send(BEAT)
                time.sleep(TICK)


@contextmanager
def ended_as_eof() -> Iterator[None]:
    """An EOFError wherever the other end is closed: the kernel calls it a reset where signs of life were not read."""
    try:
        yield
    except ConnectionError:
        raise EOFError from None
