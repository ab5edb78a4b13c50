"""Asynchronous against synchronous training on the wall clock, with an environment that takes its time.

    python benchmarks/async_training.py [--quick] [--json PATH] [--seeds 0 1 2 3] [--lag 2]

The recipe hops, every environment call delayed by a lognormal time (sigma 1) whose scale is first fitted so that
waiting makes up 60 % of a synchronous step. Then, for each seed, the same recipe with max_lag = 0 and with lag: seconds
per step without evaluations, and held-out success after the same number of updates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from turnwise.assemble.checks import check
from turnwise.assemble.model import set_threads
from turnwise.assemble.models import ModelSource
from turnwise.assemble.run import open_environments, open_tracker, run_parts
from turnwise.assemble.warm_start import starting_model
from turnwise.cli.terminal import PlainScreen
from turnwise.envs.base import Reply
from turnwise.envs.hops import Hops
from turnwise.messages import Message
from turnwise.recipe.parse import load_recipe
from turnwise.runs.archive import archived_steps, read_step
from turnwise.runs.folder import RunFolder
from turnwise.runs.interval import half_width
from turnwise.training.run import Run
from turnwise.training.state import State
from turnwise.types import turns_of

RECIPE = Path(__file__).parent.parent / "recipes" / "hops.toml"
SHARE = 0.6
QUICK = ("steps=3", "groups_per_step=4", "evaluation.final_tasks=1", "sft.updates=8")


class Late(Hops):
    """The environment of hops, with answers that come late."""

    def __init__(self, scale: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.scale = scale

    async def step(self, message: Message) -> Reply:
        if self.scale:
            await asyncio.sleep(self.scale * random.lognormvariate(0.0, 1.0))
        return await super().step(message)


class Silent(PlainScreen):
    """Says nothing and remembers when each step ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[float] = []

    def say(self, text: str) -> None:
        return None

    def show(self, done: int, metrics: Any) -> None:
        if "warm" not in self.what:
            self.ended.append(time.perf_counter())


async def trained(folder: Path, scale: float, *overrides: str) -> dict[str, float]:
    """One run's figures."""
    random.seed(0)
    late = ("env.0.name=async_training:Late", "env.0.dataset=hops", f"env.0.settings.scale={scale}")
    out = folder / f"run-{time.perf_counter_ns()}"
    recipe = load_recipe(RECIPE, [*late, "evaluation.every=0", f"out={out}", *overrides])
    check(recipe)
    set_threads(recipe)
    screen, made = Silent(), RunFolder.create(recipe.out, {})
    plain = recipe.model_copy(update={"env": load_recipe(RECIPE).env})  # so that all share one warm start
    with open_environments(plain) as environments:
        model, tokenizer = await starting_model(plain, environments, screen, {}, asyncio.Event())
    with open_environments(recipe) as environments, closing(open_tracker(recipe, made)) as tracker:
        async with run_parts(recipe, environments, ModelSource(model, tokenizer), made.evaluations) as parts:
            own = Run(recipe, made, parts, State(), screen, tracker)
            if recipe.evaluation.final_tasks > 1:
                await own.before()
            start = time.perf_counter()
            await own.train(asyncio.Event())
            spent = own.model_seconds()
    lines = [json.loads(line) for line in own.folder.metrics.read_text().splitlines() if "loss" in line]
    records = [
        record
        for step in archived_steps(own.folder.archive)
        for record in read_step(own.folder.archive / f"step-{step:06d}.parquet")
    ]
    turns = list(turns_of([record.group for record in records]))
    # The last line is written after the last evaluation: the steps before it are timed.
    seconds = lines_seconds(screen.ended, start)
    return {
        "seconds_per_step": seconds,
        "generate": spent["generate"] / recipe.steps,
        "learn": sum(spent[name] for name in ("score", "forward_backward", "optimizer")) / recipe.steps,
        "latency_per_turn": statistics.mean(turn.timing.environment for turn in turns),
        "before": own.state.before.get("sampled", math.nan),
        "after": lines[-1].get("eval/sampled/success", math.nan),
        "lag_mean": statistics.mean(line["lag/mean"] for line in lines),
        "lag_max": max(line["lag/max"] for line in lines),
    }


def lines_seconds(ended: list[float], start: float) -> float:
    """Seconds per step, the last one left out: its end waits for the last evaluation."""
    return (ended[-2] - start) / (len(ended) - 1)


def fitted(folder: Path, *overrides: str) -> tuple[float, float]:
    """(scale of the latency, share of a synchronous step that is then waiting)."""
    few = ("steps=6", "max_lag=0", "evaluation.final_tasks=1", *overrides)
    bare = asyncio.run(trained(folder, 0.0, *few))["seconds_per_step"]
    scale = bare / 10
    for _ in range(3):
        waiting = asyncio.run(trained(folder, scale, *few))["seconds_per_step"] - bare
        print(f"  latency scale {scale:.3f} s: {waiting:.2f} s of waiting on {bare:.2f} s of work a step", flush=True)
        share = waiting / (waiting + bare)
        if abs(share - SHARE) < 0.02:
            break
        scale *= SHARE / (1 - SHARE) * bare / waiting
    return scale, share


def report(runs: dict[int, list[dict[str, float]]]) -> None:
    for lag, found in runs.items():
        print(f"\nmax_lag = {lag}")
        for name in found[0]:
            values = [figures[name] for figures in found]
            print(
                f"  {name:20}" + "".join(f"{value:10.3f}" for value in values) + f"   {statistics.median(values):.3f}"
            )
    prompt, late = runs.values()
    ratios = [a["seconds_per_step"] / b["seconds_per_step"] for a, b in zip(prompt, late, strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"\nsteps per hour against max_lag = 0: {statistics.median(ratios):.2f} ({spread})")
    differences = [b["after"] - a["after"] for a, b in zip(prompt, late, strict=True)]
    if len(differences) > 1:
        mean, half = statistics.mean(differences), half_width(differences)
        print(f"success after the same updates, difference: {mean:+.3f} +- {half:.3f} (95 %, {len(differences)} seeds)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed, few small steps: under a minute")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    seeds = chosen.seeds[:1] if chosen.quick else chosen.seeds
    size = QUICK if chosen.quick else ()
    runs: dict[int, list[dict[str, float]]] = {0: [], chosen.lag: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scale, share = fitted(folder, *size)
        print(f"waiting is {share:.0%} of a synchronous step", flush=True)
        for seed in seeds:
            for lag, found in runs.items():
                found.append(asyncio.run(trained(folder, scale, f"seed={seed}", f"max_lag={lag}", *size)))
                print(f"  seed {seed}, max_lag {lag}: {found[-1]['seconds_per_step']:.2f} s a step", flush=True)
    report(runs)
    if chosen.json:
        figures = {"seeds": seeds, "scale": scale, "share": share, "runs": runs}
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
