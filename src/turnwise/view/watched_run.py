"""The runs that a page shows, by short names, and the thread that reads what they write."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from turnwise.inspect.run_reader import RunReader

log = logging.getLogger(__name__)
FILES_AT_ONCE = 24
"""Files of attempts that are read before the page sees them: a large run appears in parts, the newest first."""
SECONDS_BETWEEN = 1.0


class WatchedRun:
    """A run under a short name.

    Example:
        WatchedRun("quickstart", RunReader.open("runs/quickstart"))
    """

    def __init__(self, name: str, reader: RunReader) -> None:
        self.name = name
        self.reader = reader
        self.version = 0
        """Grows whenever something new was read."""
        self.trouble = ""
        """Why the last look at the folder failed."""
        self.finished = False
        """Whether it had a summary when it was last looked at."""

    def refresh(self) -> bool:
        """Read some of what is new. Whether there is more to read."""
        trouble, finished = "", bool(self.reader.summary)
        try:
            changed = self.reader.refresh(FILES_AT_ONCE)
        except Exception as error:  # whatever is wrong with one folder, the page goes on
            log.warning("cannot read %s", self.reader.folder.path, exc_info=True)
            changed, trouble = False, f"{type(error).__name__}: {error}"
        if changed or trouble != self.trouble or finished != self.finished:
            self.version += 1
        self.trouble, self.finished = trouble, finished
        return not trouble and self.reader.attempts.num_waiting > 0


class WatchedRuns:
    """All runs of a page. A thread reads what is new, at most once a second and only while somebody looks.

    Example:
        with WatchedRuns.open(["runs/a", "runs/b"]) as runs:
            runs["a"].reader.attempts
    """

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self.runs = {run.name: run for run in runs}
        self.mark = secrets.token_hex(4)
        """Differs from that of any other server, of which a browser may remember answers."""
        self.looked_at = threading.Event()
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None

    @classmethod
    def open(cls, paths: Sequence[Path | str]) -> WatchedRuns:
        """The runs in some folders, under the names of the folders."""
        if not paths:
            raise ValueError("name at least one run folder")
        found: dict[Path, WatchedRun] = {}
        taken: set[str] = set()
        for path in paths:
            reader, place = RunReader.open(path), Path(path).resolve()
            if place in found:
                continue
            found[place] = WatchedRun(short_name(place, taken), reader)
            taken.add(found[place].name)
        return cls(list(found.values()))

    def __getitem__(self, name: str) -> WatchedRun:
        if name not in self.runs:
            raise ValueError(f"there is no run {name!r} here; there are {', '.join(self.runs)}")
        return self.runs[name]

    def __iter__(self) -> Iterator[WatchedRun]:
        return iter(self.runs.values())

    @property
    def version(self) -> int:
        """Changes whenever a run has something new."""
        return sum(run.version for run in self)

    # ------------------------------------------------------------ reading

    def __enter__(self) -> WatchedRuns:
        """Read the newest of each run, then follow them."""
        self.refresh()
        self.thread = threading.Thread(target=self.follow, name="watch-runs", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        self.looked_at.set()
        if self.thread is not None:
            self.thread.join(timeout=10)

    def follow(self) -> None:
        more = any(run.reader.attempts.num_waiting for run in self)
        while not self.closed.is_set():
            if not more:
                self.looked_at.wait()
                self.looked_at.clear()
            began = time.monotonic()
            more = self.refresh()
            if not more:
                self.closed.wait(max(0.0, SECONDS_BETWEEN - (time.monotonic() - began)))

    def read_all(self) -> None:
        """Read all there is, at once."""
        while self.refresh():
            pass

    def refresh(self) -> bool:
        """Read some of what is new in every run. Whether there is more to read."""
        return sum(run.refresh() for run in self) > 0


def short_name(place: Path, taken: set[str]) -> str:
    """The name of a folder as a part of an address, different from those that are taken."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", place.name).strip("-.") or "run"
    if name not in taken:
        return name
    return next(other for number in range(2, len(taken) + 3) if (other := f"{name}-{number}") not in taken)
