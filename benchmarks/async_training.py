"""Asynchronous against synchronous training, with an environment that takes its time: by updates, tokens and seconds.

    python benchmarks/async_training.py [--quick] [--json PATH] [--picture PATH] [--seeds 0 1 2] [--lags 1 2 4]

The recipe hops, every environment call delayed by a lognormal time (sigma 1) whose scale is first fitted so that
waiting makes up 60 % of a synchronous step. Then, for each seed, the same recipe with max_lag = 0 and with each lag:
seconds per step without evaluations, held-out success after the same number of updates, and the updates, the sampled
tokens and the seconds after which the attempts of three steps together succeed in 0.9 of all cases (nan: never). Lag 0
is what the others are compared with, seed by seed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from paired import COLORS
from picture import Picture, title

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
GOAL, SMOOTH = 0.9, 3
"""The training success that has to be reached, over so many steps."""
AXES = {"updates": "updates", "tokens": "sampled tokens, millions", "seconds": "seconds"}
Figures = dict[str, Any]
"""Numbers of a run by name, and its curves by what they are over."""
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


async def trained(folder: Path, scale: float, *overrides: str) -> Figures:
    """One run's."""
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
    attempts = recipe.groups_per_step * recipe.rollout.group_size
    sampled = itertools.accumulate(line["trajectory/action_tokens"] * attempts for line in lines)
    curve = {
        "success": [line["success"] for line in lines],
        "updates": list(range(1, len(lines) + 1)),
        "tokens": [tokens / 1e6 for tokens in sampled],
        "seconds": [ended - start for ended in screen.ended],
    }
    return {
        "curve": curve,
        "seconds_per_step": seconds,
        "generate": spent["generate"] / recipe.steps,
        "learn": sum(spent[name] for name in ("score", "forward_backward", "optimizer")) / recipe.steps,
        "latency_per_turn": statistics.mean(turn.timing.environment for turn in turns),
        "before": own.state.before.get("sampled", math.nan),
        "after": lines[-1].get("eval/sampled/success", math.nan),
        "lag_mean": statistics.mean(line["lag/mean"] for line in lines),
        "lag_max": max(line["lag/max"] for line in lines),
        **reached(curve),
    }


def reached(curve: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The updates, tokens and seconds after which training success is GOAL, over SMOOTH steps."""
    success = curve["success"]
    places = range(SMOOTH - 1, len(success))
    first = next((place for place in places if sum(success[place - SMOOTH + 1 : place + 1]) >= GOAL * SMOOTH), None)
    return {f"{name} to {GOAL}": math.nan if first is None else curve[name][first] for name in AXES}


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


def report(runs: Mapping[int, Sequence[Figures]]) -> None:
    for lag, found in runs.items():
        print(f"\nmax_lag = {lag}")
        for name in (name for name in found[0] if name != "curve"):
            values = [figures[name] for figures in found]
            print(
                f"  {name:20}" + "".join(f"{value:10.3f}" for value in values) + f"   {statistics.median(values):.3f}"
            )
    prompt, *late = runs
    for lag in late:
        pairs = list(zip(runs[prompt], runs[lag], strict=True))
        print(f"\nmax_lag = {lag}, compared with {prompt}: median (smallest to largest)")
        for name in ("seconds_per_step", *(f"{axis} to {GOAL}" for axis in AXES)):
            ratios = [after[name] / before[name] for before, after in pairs]
            print(f"  {name:20} x {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        differences = [after["after"] - before["after"] for before, after in pairs]
        if len(differences) > 1:
            mean, half = statistics.mean(differences), half_width(differences)
            print(f"  success after the same updates: {mean:+.3f} +- {half:.3f} (95 %, {len(differences)} seeds)")


def draw(runs: Mapping[int, Sequence[Figures]], path: Path) -> None:
    """Training success by updates, tokens and seconds; a line for each seed."""
    picture = Picture(11, 3.9, columns=len(AXES), shared=False)
    for axes, (name, said) in zip(picture.panels[0], AXES.items(), strict=True):
        for (lag, found), color in zip(runs.items(), COLORS, strict=False):
            for place, figures in enumerate(found):
                curve, label = figures["curve"], f"max_lag = {lag}"
                axes.plot(curve[name], curve["success"], color=color, linewidth=1.1, label=None if place else label)
        title(axes, f"by {said}")
    picture.save(path, "", "training attempts that succeed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2, 4], help="0 is always run")
    parser.add_argument("--quick", action="store_true", help="one seed, few small steps: under a minute")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--picture", type=Path, help="draw the curves here, as SVG")
    chosen = parser.parse_args()
    seeds, lags = (chosen.seeds[:1], chosen.lags[:1]) if chosen.quick else (chosen.seeds, chosen.lags)
    size = QUICK if chosen.quick else ()
    runs: dict[int, list[Figures]] = {lag: [] for lag in (0, *lags)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scale, share = fitted(folder, *size)
        print(f"waiting is {share:.0%} of a synchronous step", flush=True)
        for seed in seeds:
            for lag, found in runs.items():
                found.append(asyncio.run(trained(folder, scale, f"seed={seed}", f"max_lag={lag}", *size)))
                print(f"  seed {seed}, max_lag {lag}: {found[-1]['seconds_per_step']:.2f} s a step", flush=True)
    report(runs)
    if chosen.picture:
        draw(runs, chosen.picture)
    if chosen.json:
        figures = {"seeds": seeds, "scale": scale, "share": share, "runs": runs}
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
