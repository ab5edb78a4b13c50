"""A tracker of a library, kept apart from the training loop.

All its calls are made in one daemon thread, in order. The loop only puts reports into a bounded queue: it never waits
for a library, and an error or a hang in one costs the reports to that tracker and a warning.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from turnwise import disk
from turnwise.runs.trackers.attempts import SampledAttempt
from turnwise.runs.trackers.library import CannotOpen, LibraryTracker
from turnwise.runs.trackers.record import TrackerRecord

log = logging.getLogger(__name__)

Report = Callable[[LibraryTracker], None]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a tracker may take, in seconds, and how many reports may wait for it."""

    open: float = 180.0
    call: float = 120.0
    close: float = 10.0
    waiting: int = 256


PATIENCE = Patience()


class IsolatedTracker:
    """A tracker that neither stops nor delays a run.

    Steps that the tracker has from before a resume are left out, unless its library `replaces` them; `earlier` are
    lines of metrics from before, of which those that it lacks are reported first.
    """

    def __init__(
        self,
        name: str,
        open_library: Callable[[], LibraryTracker],
        record: TrackerRecord,
        *,
        earlier: Sequence[Mapping[str, float]] = (),
        replaces: bool = False,
        patience: Patience = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.where = ""
        self._open_library = open_library
        self._record = record
        self._earlier = [line for line in earlier if line["step"] > record.step]
        self._reported = -1 if replaces else record.step
        self._patience = patience
        self._clock = clock
        self._changed = threading.Condition()
        self._reports: deque[Report] = deque()
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._closing = False
        self._dropped = False
        self._call_began: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ in the thread of the loop

    def wait_until_open(self, advice: str) -> None:
        """Return once the library is ready; ValueError with the advice where it is not."""
        if not self._opened.wait(self._patience.open):
            self._end()
            raise ValueError(f"{self.name} did not open within {self._patience.open:g} seconds; {advice}")
        if self._failure is not None:
            if disk.is_failure(self._failure):
                raise self._failure
            if isinstance(self._failure, CannotOpen):
                raise ValueError(str(self._failure))
            raise ValueError(f"{self.name} cannot be opened ({in_a_line(self._failure)}); {advice}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._reported:
            values = dict(metrics)
            self._put(partial(self._log, step=step, metrics=values))

    def log_unfinished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Most libraries cannot take a step back, and a resume makes this one again."""

    def log_attempts(self, step: int, rows: Sequence[SampledAttempt]) -> None:
        if step > self._reported:
            kept = tuple(rows)
            self._put(lambda tracker: tracker.log_attempts(step, kept))

    def log_curve(self, step: int, path: Path) -> None:
        if not self._record.curve:
            self._put(partial(self._log_curve, step=step, path=path))

    def close(self) -> None:
        """Have the library finish; return after a few seconds whether it has or not."""
        self._end()
        self._thread.join(self._patience.close)
        if self._thread.is_alive():
            self._drop(f"did not finish within {self._patience.close:g} seconds")

    def abandon(self) -> None:
        """Close a tracker of a run that does not begin, so that nothing is written into its folder later."""
        with self._changed:
            self._dropped = self._closing = True
            self._changed.notify()
        self._thread.join(self._patience.open)

    def _put(self, report: Report) -> None:
        began = self._call_began
        if began is not None and self._clock() - began > self._patience.call:
            self._drop(f"has been busy with one report for more than {self._patience.call:g} seconds")
        with self._changed:
            full = len(self._reports) >= self._patience.waiting
            if not self._dropped and not full:
                self._reports.append(report)
                self._changed.notify()
        if full:
            self._drop(f"is {self._patience.waiting} reports behind")

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _drop(self, reason: str) -> None:
        """Give this tracker up, and say so once."""
        with self._changed:
            if self._dropped:
                return
            self._dropped = True
            self._reports.clear()
        log.warning("%s %s: it gets no more reports; training goes on, and metrics.jsonl has all", self.name, reason)

    # ------------------------------------------------------------ in the thread of the library

    def _work(self) -> None:
        try:
            tracker = self._open_library()
            self._record.opened(tracker.id)
            self.where = tracker.where
        except BaseException as error:  # a library may even end the process
            self._failure = error
            return
        finally:
            self._opened.set()
        for line in self._earlier:
            metrics = {name: value for name, value in line.items() if name != "step"}
            self._deliver(tracker, partial(self._log, step=int(line["step"]), metrics=metrics))
        while (report := self._next()) is not None:
            self._deliver(tracker, report)
        try:
            tracker.close()
        except BaseException as error:
            self._drop(f"failed to finish ({in_a_line(error)})")

    def _next(self) -> Report | None:
        """The next report, or None where there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports or self._closing)
            return self._reports.popleft() if self._reports else None

    def _deliver(self, tracker: LibraryTracker, report: Report) -> None:
        if self._dropped:
            return
        self._call_began = self._clock()
        try:
            report(tracker)
        except BaseException as error:
            self._drop(f"failed ({in_a_line(error)})")
        finally:
            self._call_began = None

    def _log(self, tracker: LibraryTracker, step: int, metrics: Mapping[str, float]) -> None:
        tracker.log(step, metrics)
        self._record.reached(step)

    def _log_curve(self, tracker: LibraryTracker, step: int, path: Path) -> None:
        tracker.log_curve(step, path)
        self._record.drawn()


def in_a_line(error: BaseException) -> str:
    """What went wrong, short and without the password that an address may hold."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"//[^/@\s]*@", "//***@", text)[:300]
