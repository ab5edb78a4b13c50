"""The events of a run: warnings in its folder, and the first of each kind on the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def events(folder: Path) -> Iterator[None]:
    """Warnings go to the run folder's events.log; the first of each kind to the terminal too."""
    handler = EventHandler(folder / "events.log")
    root = logging.getLogger("turnwise")
    before = root.propagate
    root.addHandler(handler)
    root.propagate = False
    try:
        yield
    finally:
        root.propagate = before
        root.removeHandler(handler)
        handler.close()


class EventHandler(logging.Handler):
    """Writes every warning to a file, and the first ten to standard error; and there too, with its traceback, the first
    failure of each kind."""

    def __init__(self, path: Path, shown: int = 10) -> None:
        super().__init__(logging.WARNING)
        self.path = path
        self.left = shown
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "always_shown", False):  # the first failure of a kind, of which there are not many
            below = f"\n{record.exc_text}" if record.exc_text else ""
            print(f"warning: {record.getMessage()}{below}", file=sys.stderr)
        elif self.left > 0:
            self.left -= 1
            more = "" if self.left else f" (further warnings only in {self.path})"
            print(f"warning: {record.getMessage()}{more}", file=sys.stderr)
        if self.path.parent.is_dir():
            with suppress(OSError), self.path.open("a") as file:  # a disk that is full ends the run, but not from here
                file.write(self.format(record) + "\n")
