"""The border to whoever watches a run: what is said, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Screen(Protocol):
    """Shows a person the progress of a long command. `turnwise.cli.terminal` has those for terminals and pipes."""

    def say(self, text: str) -> None: ...

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Start a progress bar of `total` steps."""
        ...

    def show(self, done: int, metrics: Mapping[str, float]) -> None: ...

    def end(self) -> None: ...


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns: the first to the left, the others to the right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    aligned = [[cell.rjust(width) for cell in column] for column, width in zip(columns, widths, strict=True)]
    aligned[0] = [cell.ljust(widths[0]) for cell in columns[0]]
    return ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
