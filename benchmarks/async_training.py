"""Asynchronous against synchronous training, with an environment that takes its time: by updates, tokens and seconds.

    python benchmarks/async_training.py [--seeds 0 1 2 3 4] [--lags 1 2 4] [--clock cpu | wall] [--only-report]
                                        [--quick] [--data PATH] [--picture PATH] [--json PATH]

The recipe hops with 8 groups a step, every environment call delayed by a lognormal time (median 0.1 s, sigma 1). For
each seed, the same recipe with max_lag = 0 and with each lag; and five steps of lag 0 without delays, which tell how
much of a synchronous step is waiting. Every finished run is a line of the data, and one that is there is not made
again. Printed are steps per hour, held-out success after the same number of updates, training success at the moment the
quickest run of a seed ended, and the updates, sampled tokens and seconds after which the attempts of three steps
together succeed in 0.9 of all cases. Lag 0 is what the others are compared with, seed by seed.

Runs are whole: agent loop, slot engine, learner. By default their clock counts CPU seconds and jumps over what the
environment waits, and agent loop, engine and learner have a core each where they overlap, so that other work on the
machine is left out. `--clock wall` runs them by the wall clock, in threads.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from cpu_clock import CpuLoop, CpuWorkers
from matrix import Cell, finished, interval, make
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
from turnwise.runs.folder import RunFolder
from turnwise.schedule.workers import in_own_thread
from turnwise.training.run import Run
from turnwise.training.state import State

RECIPE = Path(__file__).parent.parent / "recipes" / "hops.toml"
DATA = Path(__file__).parent / "data" / "async.jsonl"
SCALE = 0.1
"""Median seconds of an environment call; its mean is 0.165."""
SHORTER = ("groups_per_step=8", "evaluation.every=0", "evaluation.greedy=false")
BARE_STEPS = 5
GOAL, SMOOTH = 0.9, 3
"""The training success that has to be reached, over so many steps."""
AXES = {"updates": "updates", "tokens": "sampled tokens, thousands", "seconds": "seconds"}
Curve = Mapping[str, Sequence[float]]
"""Training success step by step, and what it is over by name."""
Figures = dict[str, Any]
"""Numbers of a run by name, and its curve."""
QUICK = ("steps=3", "groups_per_step=4", "evaluation.final_tasks=2", "sft.updates=8")


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
            self.ended.append(asyncio.get_running_loop().time())


async def trained(folder: Path, scale: float, clock: str, *overrides: str) -> Figures:
    """The figures of one run."""
    began = time.process_time()
    random.seed(0)
    late = ("env.0.name=async_training:Late", "env.0.dataset=hops", f"env.0.settings.scale={scale}")
    out = folder / f"run-{time.perf_counter_ns()}"
    recipe = load_recipe(RECIPE, [*late, *SHORTER, f"out={out}", *overrides])
    check(recipe)
    set_threads(recipe)
    screen, made, workers = Silent(), RunFolder.create(recipe.out, {}), CpuWorkers()
    make_worker = workers.worker if clock == "cpu" else in_own_thread
    plain = recipe.model_copy(update={"env": load_recipe(RECIPE).env})  # so that all share one warm start
    with open_environments(plain) as environments:
        model, tokenizer = await starting_model(plain, environments, screen, {}, asyncio.Event())
    with open_environments(recipe) as environments, closing(open_tracker(recipe, made)) as tracker:
        source = ModelSource(model, tokenizer)
        async with run_parts(recipe, environments, source, made.evaluations, workers=make_worker) as parts:
            own = Run(recipe, made, parts, State(), screen, tracker)
            if recipe.evaluation.final_tasks > 1 and not recipe.max_lag:  # it is the same for every lag
                await own.before()
            start, before = asyncio.get_running_loop().time(), dict(workers.spent)
            await own.train(asyncio.Event())
    lines = [json.loads(line) for line in own.folder.metrics.read_text().splitlines() if "loss" in line]
    attempts = recipe.groups_per_step * recipe.rollout.group_size
    sampled = itertools.accumulate(line["trajectory/action_tokens"] * attempts for line in lines)
    curve = {
        "success": [line["success"] for line in lines],
        "updates": list(range(1, len(lines) + 1)),
        "tokens": [tokens / 1e3 for tokens in sampled],
        "seconds": [ended - start for ended in screen.ended],
    }
    return {
        "curve": curve,
        "busy": {name: (spent - before.get(name, 0.0)) / recipe.steps for name, spent in workers.spent.items()},
        "before": own.state.before.get("sampled"),
        "after": lines[-1].get("eval/sampled/success"),
        "lag_mean": statistics.mean(line["lag/mean"] for line in lines),
        "lag_max": max(line["lag/max"] for line in lines),
        "cpu_seconds": time.process_time() - began,
    }


def step_seconds(curve: Curve) -> float:
    """Seconds per step, the last one left out: its end waits for the last evaluation."""
    return curve["seconds"][-2] / (len(curve["seconds"]) - 1)


def smoothed(curve: Curve, place: int) -> float:
    """Training success over the SMOOTH steps that end at a place."""
    return statistics.fmean(curve["success"][max(0, place - SMOOTH + 1) : place + 1])


def reached(curve: Curve, name: str) -> float:
    """The updates, tokens or seconds after which training success is GOAL, over SMOOTH steps; nan if it never is."""
    places = (place for place in range(SMOOTH - 1, len(curve["success"])) if smoothed(curve, place) >= GOAL)
    first = next(places, None)
    return math.nan if first is None else curve[name][first]


def success_at(curve: Curve, seconds: float) -> float:
    """Training success of the last steps that ended by then."""
    return smoothed(curve, max(0, sum(ended <= seconds for ended in curve["seconds"]) - 1))


def by_lag(runs: Sequence[Figures]) -> dict[int, dict[int, Figures]]:
    """Runs with delays, by lag and seed; of seeds that have all lags."""
    found: dict[int, dict[int, Figures]] = {}
    for run in runs:
        if run["cell"]["scale"]:
            found.setdefault(run["cell"]["lag"], {})[run["cell"]["seed"]] = run
    whole = set.intersection(*(set(of_lag) for of_lag in found.values())) if found else set()
    return {lag: {seed: found[lag][seed] for seed in sorted(whole)} for lag in sorted(found)}


def report(runs: Sequence[Figures]) -> None:
    found = by_lag(runs)
    seeds = list(found[0])
    bare = {run["cell"]["seed"]: step_seconds(run["curve"]) for run in runs if not run["cell"]["scale"]}
    shares = [1 - bare[seed] / step_seconds(found[0][seed]["curve"]) for seed in seeds if seed in bare]
    print(f"{len(seeds)} seeds; mean +- half the width of a 95 % interval (smallest to largest)")
    print(f"held-out success before training: {spread([run['before'] for run in found[0].values()])}")
    print(f"waiting, as a share of a synchronous step: {spread(shares)}")
    quickest = {seed: min(of_lag[seed]["curve"]["seconds"][-2] for of_lag in found.values()) for seed in seeds}
    for lag, of_lag in found.items():
        curves = {seed: run["curve"] for seed, run in of_lag.items()}
        print(f"\nmax_lag = {lag}: tokens are {mean(of_lag, 'lag_mean'):.2f} versions old, at most "
              f"{max(run['lag_max'] for run in of_lag.values()):.0f}")  # fmt: skip
        print(f"  seconds per step                {spread([step_seconds(curve) for curve in curves.values()])}")
        print(f"  CPU seconds of the run          {spread([run['cpu_seconds'] for run in of_lag.values()])}")
        print(f"  held-out success after          {spread([run['after'] for run in of_lag.values()])}")
        same = [success_at(curve, quickest[seed]) for seed, curve in curves.items()]
        print(f"  training success, same seconds  {spread(same)}")
        for name, said in AXES.items():
            print(f"  {said + f' to {GOAL}':31} {spread([reached(curve, name) for curve in curves.values()])}")
    for lag in list(found)[1:]:
        pairs = [(found[0][seed], found[lag][seed]) for seed in seeds]
        print(f"\nmax_lag = {lag}, compared with 0, seed by seed")
        times = [step_seconds(before["curve"]) / step_seconds(after["curve"]) for before, after in pairs]
        print(f"  steps per hour             x    {spread(times)}")
        print(f"  held-out success after          {spread([b['after'] - a['after'] for a, b in pairs], '+')}")
        for name in AXES:
            ratios = [reached(after["curve"], name) / reached(before["curve"], name) for before, after in pairs]
            print(f"  {f'{name} to {GOAL}':26} x    {spread(ratios)}")


def mean(of_lag: Mapping[int, Figures], name: str) -> float:
    return statistics.fmean(run[name] for run in of_lag.values())


def spread(values: Sequence[float], sign: str = "") -> str:
    return f"{interval(values, sign)} ({min(values):{sign}.3f} to {max(values):{sign}.3f})" if values else "missing"


def draw(runs: Sequence[Figures], path: Path) -> None:
    """Training success by updates, tokens and seconds: thin lines for seeds, thick ones for means by step."""
    picture = Picture(11, 3.9, columns=len(AXES), shared=False)
    for axes, (name, said) in zip(picture.panels[0], AXES.items(), strict=True):
        for (lag, of_lag), color in zip(by_lag(runs).items(), COLORS, strict=False):
            curves = [run["curve"] for run in of_lag.values()]
            # The end of the last step waits for the last evaluation.
            across, up = ([curve[of][:-1] for curve in curves] for of in (name, "success"))
            for xs, ys in zip(across, up, strict=True):
                axes.plot(xs, ys, color=color, linewidth=0.6, alpha=0.4)
            means = [[statistics.fmean(values) for values in zip(*lines, strict=True)] for lines in (across, up)]
            axes.plot(*means, color=color, linewidth=2, label=f"max_lag = {lag}")
        title(axes, f"by {said}")
    picture.save(path, "", "training attempts that succeed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2, 4], help="0 is always run")
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu")
    parser.add_argument("--data", type=Path, default=DATA, help="finished runs, as JSON lines")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="one seed, few small steps: under a minute")
    parser.add_argument("--json", type=Path, help="write the runs here")
    parser.add_argument("--picture", type=Path, help="draw the curves here, as SVG")
    chosen = parser.parse_args()
    seeds, lags = (chosen.seeds[:1], chosen.lags[:1]) if chosen.quick else (chosen.seeds, chosen.lags)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "quick.jsonl" if chosen.quick else chosen.data

        def run(cell: Cell) -> Figures:
            few = QUICK if chosen.quick else (f"steps={BARE_STEPS}", "evaluation.final_tasks=1")
            overrides = () if cell["scale"] and not chosen.quick else few
            with asyncio.Runner(loop_factory=CpuLoop if cell["clock"] == "cpu" else None) as runner:
                settings = f"seed={cell['seed']}", f"max_lag={cell['lag']}"
                return runner.run(trained(folder, cell["scale"], cell["clock"], *settings, *overrides))

        if not chosen.only_report:
            for seed in seeds:
                same = {"seed": seed, "clock": chosen.clock}
                late = [{"lag": lag, "scale": SCALE, **same} for lag in (0, *lags)]
                make([{"lag": 0, "scale": 0.0, **same}, *late], data, run)
        runs = [run for run in finished(data) if run["cell"]["clock"] == chosen.clock]
    report(runs)
    if chosen.picture:
        draw(runs, chosen.picture)
    if chosen.json:
        chosen.json.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
