"""What checks of loads cost: CPU seconds of a step at max_lag = 2 on a small model, with and without them.

    python benchmarks/check_cost.py [--steps 24] [--repeats 3] [--json FILE]

The recipe hops without its warm start, small groups. Three settings in the same process, in turn: every load is checked
(`weight_check.every = 1`), as many as the budget allows (the default), and none. CPU seconds are those of this process,
engine and learner included, from the end of the first step to that of the last. Prints them per step, and what checks
add to those of no checks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from turnwise.assemble.checks import check
from turnwise.assemble.model import set_threads
from turnwise.assemble.models import ModelSource
from turnwise.assemble.run import open_environments, run_parts
from turnwise.assemble.warm_start import starting_model
from turnwise.cli.terminal import PlainScreen
from turnwise.recipe.parse import load_recipe
from turnwise.training.loop import Progress, train, unchecked

RECIPE = Path(__file__).parent.parent / "recipes" / "hops.toml"
SMALL = ("max_lag=2", "groups_per_step=4", "sft.updates=1", "evaluation.every=0", "evaluation.final_tasks=1")
SETTINGS = {"every load": "weight_check.every=1", "by the budget": "weight_check.every=0", "none": ""}


class Silent(PlainScreen):
    def say(self, text: str) -> None:
        return None

    def show(self, done: int, metrics: Any) -> None:
        return None


async def measured(folder: Path, steps: int, setting: str) -> tuple[float, int]:
    """(CPU seconds a step, loads that were checked)"""
    given = [*SMALL, f"steps={steps}", f"out={folder}", *([setting] if setting else [])]
    recipe = load_recipe(RECIPE, given)
    check(recipe)
    set_threads(recipe)
    spent: list[float] = []
    checked = 0

    async def after(progress: Progress, metrics: dict[str, float], records: Any, waiting: Any) -> None:
        nonlocal checked
        spent.append(time.process_time())
        checked += "weight_check/gap" in metrics

    with open_environments(recipe) as environments:
        model, tokenizer = await starting_model(recipe, environments, Silent(), {}, asyncio.Event())
        async with run_parts(recipe, environments, ModelSource(model, tokenizer), folder / "evaluations") as parts:
            stages = parts.loop.stages if setting else replace(parts.loop.stages, arrived=unchecked)
            await train(replace(parts.loop, stages=stages), Progress(), after, asyncio.Event())
    return (spent[-1] - spent[0]) / (len(spent) - 1), checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    rows: dict[str, list[tuple[float, int]]] = {name: [] for name in SETTINGS}
    for _ in range(chosen.repeats):
        for name, setting in SETTINGS.items():
            with tempfile.TemporaryDirectory() as folder:
                rows[name].append(asyncio.run(measured(Path(folder), chosen.steps, setting)))
    none = statistics.median(each for each, _ in rows["none"])
    print(f"{chosen.steps} steps at max_lag = 2, medians and ranges of {chosen.repeats}")
    print("| checks | loads checked | CPU seconds a step | more than without |")
    print("|---|---|---|---|")
    for name, found in rows.items():
        seconds = [each for each, _ in found]
        middle = statistics.median(seconds)
        counts = sorted({count for _, count in found})
        print(
            f"| {name} | {', '.join(map(str, counts))} | {middle:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) "
            f"| {(middle / none - 1) * 100:.1f} % |"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
