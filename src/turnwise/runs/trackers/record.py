"""What the folder of a run remembers of each tracker, so that a resume continues the same run there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from turnwise.atomic import write_atomically

ID = re.compile(r"[\w.-]{1,200}")


class TrackerRecord:
    """The id of a run in a tracker, the last step that was reported there, and whether its curve was.

    Example:
        {"id": "3f9a0c1d", "step": 40, "curve": false}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = ""
        """Empty before the tracker was opened for the first time."""
        self.step = -1
        self.curve = False
        if not path.exists():
            return
        try:
            kept = json.loads(path.read_text())
            self.id, self.step, self.curve = kept["id"], kept["step"], kept["curve"]
            sound = ID.fullmatch(self.id) is not None and type(self.step) is int and type(self.curve) is bool
        except (OSError, ValueError, KeyError, TypeError):
            sound = False
        if not sound:
            raise ValueError(f"{path} is damaged; remove it to begin a new run in this tracker")

    def opened(self, id: str) -> None:
        self.id = id
        self._write()

    def reached(self, step: int) -> None:
        self.step = max(step, self.step)
        self._write()

    def drawn(self) -> None:
        self.curve = True
        self._write()

    def _write(self) -> None:
        text = json.dumps({"id": self.id, "step": self.step, "curve": self.curve})
        write_atomically(self.path, text + "\n")
