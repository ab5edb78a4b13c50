"""What a Python session sees of a run."""

from __future__ import annotations

from collections.abc import Mapping

from turnwise.cli.terminal import open_screen
from turnwise.runs.screen import Screen


class QuietScreen:
    """Shows nothing."""

    def say(self, text: str) -> None:
        return None

    def begin(self, what: str, total: int, done: int = 0) -> None:
        return None

    def show(self, done: int, metrics: Mapping[str, float]) -> None:
        return None

    def end(self) -> None:
        return None


def screen_of(show: bool) -> Screen:
    """The screen of the command line, or none."""
    return open_screen() if show else QuietScreen()
