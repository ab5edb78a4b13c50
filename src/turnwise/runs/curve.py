"""The curve of a run: success while training and on held-out tasks, as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.atomic import write_atomically

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e8eaee"
TRAINING = "#4c78a8"
HELD_OUT = {"sampled": ("#e07b39", "o"), "greedy": ("#3a9a6a", "D")}


def draw_curve(metrics: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Write a PNG of 1200 x 700 pixels: `success` per step, with `eval/sampled/success` and `eval/greedy/success` at
    the version of the weights they are of, which an evaluation beside training is logged some steps after.

    `metrics` are lines of `tracker.read_metrics`; lines without a value, or with NaN, leave it out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), dpi=100, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.3, h_pad=0.25)  # type: ignore[union-attr,call-arg]
    axes = figure.add_subplot()
    _draw_frame(axes, title, [line["step"] for line in metrics])
    steps, success = _series(metrics, "success")
    if len(steps):
        dot = "o" if len(steps) == 1 else None
        axes.plot(steps, success, color=TRAINING, alpha=0.3, linewidth=1.2, zorder=2)
        axes.plot(
            steps, smooth(success), color=TRAINING, linewidth=2.6, marker=dot, label="training, smoothed", zorder=3
        )
    for name, (color, marker) in HELD_OUT.items():
        steps, success = _series(metrics, f"eval/{name}/success", f"eval/{name}/version")
        if len(steps):
            axes.plot(steps, success, color=color, alpha=0.45, linewidth=1.2, linestyle=(0, (4, 3)), zorder=4)
            axes.plot(
                steps, success, color=color, marker=marker, markersize=8, linestyle="none", zorder=5,
                markeredgecolor="white", markeredgewidth=1.4, label=f"held out, {name}", clip_on=False,
            )  # fmt: skip
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=3, borderaxespad=0.4, borderpad=0,
            frameon=False, fontsize=13, labelcolor=MUTED, handlelength=1.6, handletextpad=0.6, columnspacing=2,
        )  # fmt: skip
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, picture.getvalue())


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A running mean under a bell a twentieth of the curve wide, which does not lag and does not sag at the ends."""
    width = max(1.0, len(values) / 40)
    reach = min(math.ceil(3 * width), (len(values) - 1) // 2)
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    smoothed: NDArray[np.float64] = np.convolve(values, bell, "same") / np.convolve(np.ones(len(values)), bell, "same")
    return smoothed


def _series(
    metrics: Sequence[Mapping[str, float]], name: str, place: str = "step"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Places and values of one metric, where it has a value; a line without the place is at its step."""
    points = [
        (line.get(place, line["step"]), line[name]) for line in metrics if math.isfinite(line.get(name, math.nan))
    ]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return steps, values


def _draw_frame(axes: Any, title: str, steps: Sequence[float]) -> None:
    """Title, axes that reach over all `steps` and the whole range of success, and a quiet grid."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=18, fontweight="bold", color=INK, pad=44)
    axes.set_xlabel("step", fontsize=13, color=MUTED, labelpad=8)
    axes.set_ylabel("attempts that succeed", fontsize=13, color=MUTED, labelpad=8)
    draw_scale(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    first, last = min(steps, default=0), max(steps, default=0)
    room = 0.02 * max(1, last - first)
    axes.set_xlim(first - room, max(last, first + 1) + room)
    axes.tick_params(labelsize=12, pad=6)
    axes.spines["bottom"].set_color(GRID)


def draw_scale(axes: Any) -> None:
    """The whole range of success in percent, with a quiet grid and no frame."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
