"""What a person sees of a run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from turnwise.runs.screen import Screen

if TYPE_CHECKING:
    from turnwise.runs.transcript import Line


def headline(metrics: Mapping[str, float]) -> str:
    """The few numbers worth a glance."""
    parts = []
    for name, label, form in (
        ("reward/mean", "reward", "{:.3f}"),
        ("success", "success", "{:.3f}"),
        ("eval/sampled/success", "held-out", "{:.3f}"),
        ("loss", "loss", "{:.3f}"),
        ("speed/tokens_per_second", "tok/s", "{:,.0f}"),
        ("lag/max", "lag", "{:.0f}"),
    ):
        if name in metrics and not (name == "loss" and "speed/tokens_per_second" in metrics):
            parts.append(f"{label} {form.format(metrics[name])}")
    return "  ".join(parts)


class PlainScreen:
    """One line per report, at most one every `seconds`."""

    def __init__(self, seconds: float = 2.0) -> None:
        self.seconds = seconds
        self.last = 0.0

    def say(self, text: str) -> None:
        print(writable(text), flush=True)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total, self.started, self.first = what, total, time.monotonic(), done

    def show(self, done: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self.last < self.seconds and done < self.total and "eval/sampled/success" not in metrics:
            return
        self.last = now
        pace = (now - self.started) / max(1, done - self.first)
        left = pace * (self.total - done)
        print(f"{self.what} {done}/{self.total}  {headline(metrics)}  {left:.0f} s left", flush=True)

    def end(self) -> None:
        return None


class RichScreen:
    """A progress bar with the headline beside it."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console()
        self.bar: Any = None

    def say(self, text: str) -> None:
        self.console.print(writable(text), highlight=False, markup=False, emoji=False)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.end()
        columns = ("{task.description}", BarColumn(20), MofNCompleteColumn(), TextColumn("{task.fields[line]}"))
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
        self.bar.start()
        self.task = self.bar.add_task(what, total=total, completed=done, line="")

    def show(self, done: int, metrics: Mapping[str, float]) -> None:
        self.bar.update(self.task, completed=done, line=headline(metrics))

    def end(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def writable(text: str) -> str:
    """The text with what standard output cannot encode written as escapes: the words of a model must not end a run."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_line(line: Line) -> None:
    """Print styled text: in colour on a terminal, plain into a pipe."""
    if not sys.stdout.isatty():
        print(writable("".join(span.text for span in line)))
        return
    from rich.console import Console
    from rich.text import Text

    Console().print(Text.assemble(*((span.text, span.style) for span in line)), soft_wrap=True)


def open_screen() -> Screen:
    """Rich in a terminal, plain where output goes to a file or a pipe."""
    return RichScreen() if sys.stdout.isatty() else PlainScreen()
