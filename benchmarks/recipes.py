"""Held-out success before and after the recipes for `hops`: PPO with a critic, REINFORCE++, GiGPO, distillation.

    python benchmarks/recipes.py [--quick] [--json PATH] [--only ppo gigpo] [--seeds 0 1 2] [--out FOLDER]

All start from the warm start of their seed. The teacher of the distillation is what the recipe hops comes to, with seed
0; it is trained first. With --out, a picture of the curves is written.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from picture import Picture

from turnwise.assemble import run
from turnwise.cli.terminal import PlainScreen
from turnwise.recipe.parse import load_recipe
from turnwise.runs.checkpoint import latest_checkpoint
from turnwise.runs.folder import RunFolder
from turnwise.runs.interval import wilson
from turnwise.runs.tracker import read_metrics

RECIPES = Path(__file__).parent.parent / "recipes"
NAMES = {"ppo": "#1f77b4", "reinforce_pp": "#d95f02", "gigpo": "#1b9e77", "distill": "#7b3294"}
"""By recipe: the colour of its curve."""
QUICK = ["steps=2", "groups_per_step=2", "evaluation.every=0", "evaluation.final_tasks=4", "sft.updates=2"]


class Silent(PlainScreen):
    """Says nothing."""

    def say(self, text: str) -> None:
        return None

    def show(self, done: int, metrics: Any) -> None:
        return None


def trained(name: str, seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run's figures."""
    out = folder / f"{name}-{seed}"
    recipe = load_recipe(RECIPES / f"{name}.toml", [f"seed={seed}", f"out={out}", *overrides])
    began = time.perf_counter()
    summary = asyncio.run(run.start(recipe, Silent(), asyncio.Event()))
    assert summary is not None
    lines = read_metrics(RunFolder.open(out).metrics)
    curve = {line["step"]: line["eval/sampled/success"] for line in lines if "eval/sampled/success" in line}
    figures = {
        "before": summary["before"]["sampled"],
        "after": summary["after"]["sampled"],
        "greedy": summary["after"]["greedy"],
        "seconds": time.perf_counter() - began,
        "tasks": recipe.evaluation.final_tasks,
        "curve": curve,
    }
    print(f"  {name}, seed {seed}: {figures['before']:.3f} -> {figures['after']:.3f}", flush=True)
    return figures


def report(runs: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n{'recipe':16}{'before':>10}{'after':>10}{'greedy':>10}{'seconds':>10}   every seed: before -> after")
    for name, found in runs.items():
        middle = [statistics.mean(f[key] for f in found) for key in ("before", "after", "greedy", "seconds")]
        each = ", ".join(f"{f['before']:.3f} -> {f['after']:.3f}" for f in found)
        print(f"{name:16}" + "".join(f"{value:10.3f}" for value in middle[:3]) + f"{middle[3]:10.0f}   {each}")
    tasks = next(iter(runs.values()))[0]["tasks"]
    low, high = wilson(tasks / 2, tasks)
    print(f"\na single figure is of {tasks:.0f} attempts: at most +- {(high - low) / 2:.3f} (95 %)")


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Write an SVG: every seed as a thin line, their mean as a thick one."""
    picture = Picture(9, 5.2)
    axes = picture.panels[0][0]
    for name, found in runs.items():
        curves = [f["curve"] for f in found]
        steps = list(curves[0])
        for curve in curves:
            axes.plot(steps, list(curve.values()), color=NAMES[name], alpha=0.3, linewidth=1)
        middle = [statistics.mean(curve[step] for curve in curves) for step in steps]
        axes.plot(steps, middle, color=NAMES[name], linewidth=2.6, marker="o", markersize=5, label=name)
    picture.save(path, "step", "held-out attempts that succeed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed, few small steps: under a minute")
    parser.add_argument("--json", type=Path, help="write the figures here, after every run")
    parser.add_argument("--out", type=Path, help="draw curves-recipes.svg in this folder")
    chosen = parser.parse_args()
    seeds, overrides = (chosen.seeds[:1], QUICK) if chosen.quick else (chosen.seeds, [])
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen.only}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "distill" in runs:
            trained("hops", 0, folder, overrides)
            teacher = latest_checkpoint(RunFolder.open(folder / "hops-0").checkpoints)
            assert teacher is not None
        for seed in seeds:
            for recipe, found in runs.items():
                own = [f"teacher={teacher.path}"] if recipe == "distill" else []
                found.append(trained(recipe, seed, folder, [*overrides, *own]))
                if chosen.json:
                    chosen.json.write_text(json.dumps({"seeds": seeds, "runs": runs}, indent=2) + "\n")
    report(runs)
    if chosen.out:
        draw(runs, chosen.out / "curves-recipes.svg")


if __name__ == "__main__":
    main()
