"""Calls of plain functions in daemon threads, awaited from an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


class DaemonThreads:
    """Runs each call in a new daemon thread, so that one that never returns blocks neither the event loop nor the end
    of the process. It counts the threads whose callers gave up, and refuses new calls when too many of them hang.

    Example:
        threads = DaemonThreads("environments", most_hanging=256)
        if complaint := threads.complaint():
            raise EnvironmentFailure(complaint)
        answer = await threads.run(lambda: environment.step(message), "Maze.step", as_failure)
    """

    def __init__(self, what: str, most_hanging: int) -> None:
        self.what = what
        """Whose calls these are, for the complaint."""
        self.most_hanging = most_hanging
        self.hanging: set[threading.Thread] = set()
        """Threads whose callers have given up."""

    def complaint(self) -> str:
        """Why no call may start now; empty if one may."""
        self.hanging.difference_update([thread for thread in self.hanging if not thread.is_alive()])
        if len(self.hanging) < self.most_hanging:
            return ""
        return f"{len(self.hanging)} calls of {self.what} hang; give what they wait for a time-out of its own"

    async def run(self, work: Callable[[], Any], name: str, as_error: Callable[[BaseException], BaseException]) -> Any:
        """What `work` returns, in a thread with this name. Whatever it raises is raised here as `as_error` makes it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(settle_future: Callable[[Any], None], value: Any) -> None:
            if not future.done():
                settle_future(value)

        def run_in_thread() -> None:
            try:
                settle_future, value = future.set_result, work()
            except BaseException as error:
                settle_future, value = future.set_exception, as_error(error)
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                loop.call_soon_threadsafe(settle, settle_future, value)

        thread = threading.Thread(target=run_in_thread, daemon=True, name=name)
        thread.start()
        try:
            return await future
        except asyncio.CancelledError:
            self.hanging.add(thread)
            raise
