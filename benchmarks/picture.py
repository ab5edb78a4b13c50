"""A picture of a benchmark: panels of curves in an SVG, which is the same file for the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.runs.curve import INK, MUTED, draw_scale


class Picture:
    """Panels in rows and columns.

    Example:
        picture = Picture(9, 5.2)
        picture.panels[0][0].plot(steps, success, label="grpo")
        picture.save(path, "step", "attempts that succeed")
    """

    def __init__(self, width: float, height: float, rows: int = 1, columns: int = 1, *, shared: bool = True) -> None:
        import matplotlib
        from matplotlib.figure import Figure

        matplotlib.rcParams["svg.hashsalt"] = "turnwise"  # without it the names inside an SVG are random
        self.figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
        axes: Any = self.figure.subplots(rows, columns, sharex=shared, sharey=shared, squeeze=False)
        self.panels: Sequence[Sequence[Any]] = axes
        """Axes of matplotlib; with `shared` they have one scale."""
        for axes in (axes for row in self.panels for axes in row):
            draw_scale(axes)

    def save(self, path: Path, across: str, up: str, *, legend: str = "lower right") -> None:
        """Label what lies at the left and at the bottom, explain the curves in the first panel, or beside all panels
        where `legend` begins with "outside", and write the file."""
        for axes in self.panels[-1]:
            axes.set_xlabel(across, color=MUTED)
        for row in self.panels:
            row[0].set_ylabel(up, color=MUTED)
        first = self.panels[0][0]
        if legend.startswith("outside"):
            curves, names = first.get_legend_handles_labels()
            self.figure.legend(curves, names, loc=legend, frameon=False, labelcolor=INK, fontsize=9)
        else:
            first.legend(loc=legend, frameon=False, labelcolor=INK, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.figure.savefig(path, format="svg", metadata={"Date": None})


def title(axes: Any, text: str) -> None:
    axes.set_title(text, color=INK, fontsize=10)
