"""Training runs in several arms with the same seeds, and the differences between the arms."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from learned import QUICK, Case, report, trained
from picture import Picture

from turnwise.runs.interval import half_width

COLORS = ("#1f77b4", "#d95f02", "#1b9e77", "#7b3294", "#666666")
Arm = tuple[Case, Callable[[], AbstractContextManager[Any]]]
"""What is trained, and what holds while it is."""


def compare(description: str, arms: Mapping[str, Arm]) -> None:
    """Train every arm with every seed. The first arm is what the others are compared with, seed by seed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(arms), default=list(arms))
    parser.add_argument("--quick", action="store_true", help="one seed and two small steps of each arm")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw training success by step here, as SVG")
    chosen = parser.parse_args()
    seeds, overrides = (chosen.seeds[:1], QUICK) if chosen.quick else (chosen.seeds, ())
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(chosen.arms):
            case, during = arms[name]
            with during():
                found[name] = [trained(case, seed, Path(folder) / f"{number}-{seed}", overrides) for seed in seeds]
            report(name, seeds, found[name])
            if chosen.json:
                chosen.json.write_text(json.dumps({"seeds": seeds, "runs": found}, indent=2) + "\n")
    if chosen.picture:
        draw(found, chosen.picture)
    first, *others = chosen.arms
    for name in others:
        print(f"\n{name}, minus {first}: mean over {len(seeds)} seeds with its 95 % interval")
        for kind in ("greedy", "sampled"):
            print(f"  {kind} success after training  {difference(found[name], found[first], kind)}")


def draw(found: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Training success by step: a thin line for each seed, a thick one for their mean."""
    picture = Picture(9, 5.2)
    axes = picture.panels[0][0]
    for (name, runs), color in zip(found.items(), COLORS, strict=False):
        curves = [run["training"] for run in runs]
        for curve in curves:
            axes.plot(range(1, len(curve) + 1), curve, color=color, linewidth=0.7, alpha=0.5)
        mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2.2, label=name)
    picture.save(path, "step", "training attempts that succeed")


def difference(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], kind: str) -> str:
    values = [run["after"][kind] - other["after"][kind] for run, other in zip(runs, others, strict=True)]
    mean, half = statistics.fmean(values), half_width(values)
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"
