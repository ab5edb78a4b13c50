"""The simulator against real runs, the orders of training compared, and recipes on more cards than there are.

    python benchmarks/simulate.py [--quick] [--json PATH] [--only check orders cards] [--seeds 3]

check     One real run is taken to pieces: seconds of the engine's passes by what they hold, of the learner's steps, of
          the agent loop for a turn, and the attempts themselves. From these, runs of other shapes are predicted and
          then made: synchronous, with more groups and lag, with environments of heavier tails. Goal: within 10 %.
          Runs are whole (agent loop, slot engine, learner, environments of the recipe hops, weights that hardly move).
          Their clock counts CPU seconds, and jumps over what environments wait. Agent loop, engine and learner have a
          core each where they overlap, so that other work on the machine is left out.
orders    Steps per hour of every order in which groups are trained on, as a share of what the busiest part allows.
cards     Recipes on 8 to 1,024 cards, split at best between learner and engines. Predicted, not run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from cpu_clock import CpuLoop, loop_here

from turnwise.preflight.attempt_shape import AttemptShape
from turnwise.recipe.parse import load_recipe
from turnwise.simulate.outcome import SimulatedRun
from turnwise.simulate.pace import LearnerPace, MeasuredPace
from turnwise.simulate.simulation import Setup, simulate
from turnwise.simulate.workload import LognormalDelay, RedrawnGroups, ShapedGroups, SimulatedTurn

RECIPE = Path(__file__).parent.parent / "recipes" / "hops.toml"

STEADY = ("optimizer.learning_rate=1e-9", "evaluation.every=0", "evaluation.final_tasks=1", "evaluation.greedy=false")
SMALL = ("rollout.group_size=4", "rollout.max_turns=4", "rollout.max_action_tokens=4", "sft.updates=8")
"""Attempts that cost little, so that there can be many steps."""
CALIBRATION = {"max_lag": 1, "groups_per_step": 4, "scale": 0.10, "sigma": 0.5}
SHAPES = {
    "synchronous, 6 groups": {"max_lag": 0, "groups_per_step": 6, "scale": 0.10, "sigma": 0.5},
    "lag 2, 8 groups, slow environments": {"max_lag": 2, "groups_per_step": 8, "scale": 0.40, "sigma": 0.5},
    "lag 2, 4 groups, heavy tails": {"max_lag": 2, "groups_per_step": 4, "scale": 0.30, "sigma": 1.0},
}


# ---------------------------------------------------------------- real runs by a clock of CPU seconds


class Watch:
    """What the parts of a real run took."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, int, int, float]] = []
        """(sequences, tokens of prompts, calls that ended, seconds until the next pass) of each pass after which there
        was work left: what the event loop does with calls that ended delays the next one."""
        self.steps: list[tuple[float, float]] = []
        """(unique tokens, CPU seconds) of each step of the learner."""
        self.publish: list[float] = []
        self.load: list[float] = []
        self.record: list[float] = []
        """Of all that is written after steps."""
        self.ended: list[float] = []

    def worker(self, name: str) -> Callable[..., Any]:
        """Makes calls here, and delivers them when as many seconds have passed by the loop's clock."""

        async def run(function: Callable[..., Any], *arguments: Any) -> Any:
            result, spent = self.timed(function, *arguments)
            loop_here().elsewhere += spent
            if name == "record":
                self.record.append(spent)
            await asyncio.sleep(spent)
            return result

        return run

    def timed(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        began = time.thread_time()
        result = function(*arguments)
        spent = time.thread_time() - began
        if function.__name__ == "train_step":
            self.steps.append((result[0]["tokens/planned"], spent))
        elif function.__name__ == "publish":
            self.publish.append(spent)
        elif function.__name__ == "load":
            self.load.append(spent)
        return result, spent

    def watch_passes(self, model: Any) -> None:
        """Time the passes of a slot engine's model."""
        step, schedule, load = model.step, model.scheduler.schedule, model.load
        last: list[Any] = []
        before: list[Any] = []

        def scheduled() -> Any:
            last[:] = [schedule()]
            return last[0]

        def timed_step() -> Any:
            now = loop_here().time()
            if before:
                self.passes.append((*before[1:], now - before[0]))
            before.clear()
            finished = step()
            if last and last[0].size and model.scheduler.busy:
                rows = len(last[0].slots)
                before[:] = [now, rows, last[0].size - rows, len(finished)]
            return finished

        def untimed_load(*arguments: Any) -> Any:
            before.clear()
            return load(*arguments)

        untimed_load.__name__ = "load"
        model.scheduler.schedule, model.step, model.load = scheduled, timed_step, untimed_load


@dataclass(frozen=True, slots=True)
class Real:
    """A real run."""

    seconds_per_step: float
    lag_mean: float
    watch: Watch
    groups: list[Any]
    """Attempts of each group as (tokens the turn before did not have, sampled tokens)."""
    turn_seconds: float
    """That the agent loop computed for a turn."""


def overrides_of(shape: dict[str, Any]) -> list[str]:
    """What a recipe needs for a shape. Loads are not checked: that is a part of its own, with a cost of its own."""
    unchecked = ["weight_check.every=1000"] if shape["max_lag"] else []
    return [*unchecked, *(f"{name}={value}" for name, value in shape.items() if name not in ("scale", "sigma"))]


def drawn_delay(scale: float, sigma: float) -> float:
    return scale * random.lognormvariate(0.0, sigma)


async def real_run(folder: Path, shape: dict[str, Any], steps: int) -> Real:
    from async_training import Silent

    from turnwise.assemble.checks import check
    from turnwise.assemble.model import set_threads
    from turnwise.assemble.models import ModelSource
    from turnwise.assemble.run import open_environments, open_tracker, run_parts
    from turnwise.assemble.warm_start import starting_model
    from turnwise.runs.archive import archived_steps, read_step
    from turnwise.runs.folder import RunFolder
    from turnwise.training.run import Run
    from turnwise.training.state import State

    random.seed(0)
    late = ("env.0.name=simulate:Delayed", "env.0.dataset=hops")
    delays = [f"env.0.settings.{name}={shape[name]}" for name in ("scale", "sigma")]
    rest = overrides_of(shape)
    out = folder / f"run-{time.perf_counter_ns()}"
    recipe = load_recipe(RECIPE, [*late, *delays, *STEADY, *SMALL, *rest, f"out={out}", f"steps={steps}"])
    check(recipe)
    set_threads(recipe)
    screen, made, watch = Silent(), RunFolder.create(recipe.out, {}), Watch()
    plain = recipe.model_copy(update={"env": load_recipe(RECIPE).env})  # so that all share one warm start
    with open_environments(plain) as environments:
        model, tokenizer = await starting_model(plain, environments, screen, {}, asyncio.Event())
    with open_environments(recipe) as environments, closing(open_tracker(recipe, made)) as tracker:
        source = ModelSource(model, tokenizer)
        async with run_parts(recipe, environments, source, made.evaluations, workers=watch.worker) as parts:
            if not recipe.max_lag:  # inline: part of the loop's own time
                object.__setattr__(parts.loop.stages, "run", inline_timed(watch))
            engine: Any = parts.loop.engine
            watch.watch_passes(engine.model)
            screen.show = lambda done, metrics: watch.ended.append(loop_here().time())
            own = Run(recipe, made, parts, State(), screen, tracker)
            before = loop_here().own
            await own.train(asyncio.Event())
            spent = loop_here().own - before
    lines = [json.loads(line) for line in own.folder.metrics.read_text().splitlines() if "loss" in line]
    groups = [
        record.group
        for step in archived_steps(own.folder.archive)
        for record in read_step(own.folder.archive / f"step-{step:06d}.parquet")
    ]
    turns = sum(len(attempt.turns) for group in groups for attempt in group.trajectories)
    skip = recipe.max_lag + 1
    return Real(
        seconds_per_step=(watch.ended[-2] - watch.ended[skip - 1]) / (len(watch.ended) - 1 - skip),
        lag_mean=statistics.mean(line["lag/mean"] for line in lines[skip:]),
        watch=watch,
        groups=[[attempt_of(each) for each in group.trajectories] for group in groups if group.trajectories],
        turn_seconds=spent / turns,
    )


def inline_timed(watch: Watch) -> Callable[..., Any]:
    async def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return watch.timed(function, *arguments)[0]

    return run


def attempt_of(trajectory: Any) -> list[SimulatedTurn]:
    """The turns of an attempt for the simulator."""
    made, before = [], 0
    for turn in trajectory.turns:
        made.append(SimulatedTurn(max(0, len(turn.prompt) - before), len(turn.action), 0.0))
        before = len(turn.prompt) + len(turn.action)
    return made


def __getattr__(name: str) -> Any:
    """The environment of hops with answers that come late, made when a recipe asks for it."""
    if name != "Delayed":
        raise AttributeError(name)
    from turnwise.envs.hops import Hops

    class Delayed(Hops):
        def __init__(self, scale: float = 0.0, sigma: float = 1.0, **settings: Any) -> None:
            super().__init__(**settings)
            self.scale, self.sigma = scale, sigma

        async def step(self, message: Any) -> Any:
            await asyncio.sleep(drawn_delay(self.scale, self.sigma))
            return await super().step(message)

    globals()[name] = Delayed
    return Delayed


# ---------------------------------------------------------------- the check


@dataclass(frozen=True, slots=True)
class Calibration:
    """The paces of a real run's parts."""

    engine: MeasuredPace
    learner: LearnerPace
    """Publishing includes what is written after a step."""
    turn_seconds: float
    """Of the agent loop for a turn, those in which the engine waits included."""
    groups: list[Any]


def calibrated(run: Real) -> Calibration:
    rows, prompts, ended, seconds = np.array(run.watch.passes).T
    usual = seconds < 10 * np.median(seconds)  # others are passes that a collection of garbage fell into
    design = np.stack([np.ones_like(rows), rows, prompts, ended], 1)[usual]
    parts = np.linalg.lstsq(design, seconds[usual], rcond=None)[0]
    fixed, sequence, prompt, call = (float(max(0.0, part)) for part in parts)
    tokens, spent = np.array(run.watch.steps[1:]).T
    learner = LearnerPace(
        fixed=0.0,
        token=float(spent.sum() / tokens.sum()),
        publish=statistics.median(run.watch.publish) + sum(run.watch.record) / len(run.watch.ended),
        load=statistics.median(run.watch.load),
    )
    return Calibration(MeasuredPace(fixed, sequence, prompt, call), learner, run.turn_seconds, run.groups)


def predicted(found: Calibration, shape: dict[str, Any], seeds: int) -> list[SimulatedRun]:
    from turnwise.assemble.run import settings_of

    rest = overrides_of(shape)
    recipe = load_recipe(RECIPE, [*STEADY, *SMALL, *rest, "steps=60"])
    workload = RedrawnGroups(found.groups, LognormalDelay(shape["scale"], shape["sigma"]))
    beside = max(0.0, found.turn_seconds - found.engine.call)
    setup = Setup(found.engine, found.learner, workload, 1, recipe.engine.max_num_seqs, turn_seconds=beside)
    if not recipe.max_lag:  # one thread does everything, and weights are not copied
        inline = replace(found.engine, call=found.turn_seconds)
        setup = replace(setup, engine=inline, learner=replace(found.learner, load=0.0), turn_seconds=0.0)
    return [simulate(setup, settings_of(recipe), seed=seed) for seed in range(seeds)]


def check_against_runs(chosen: argparse.Namespace) -> dict[str, Any]:
    """Runs are made in processes of their own, and predictions meanwhile."""
    steps = 6 if chosen.quick else chosen.steps
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(chosen.processes, mp_context=get_context("spawn")) as pool,
    ):
        runs = {
            label: pool.submit(in_cpu_time, Path(name), shape, steps)
            for label, shape in {"calibration": CALIBRATION, **SHAPES}.items()
        }
        run = runs["calibration"].result()
        found = calibrated(run)
        print(f"calibration: {describe(CALIBRATION)}; {run.seconds_per_step:.3f} s a step")
        print(f"  engine: {found.engine}\n  learner: {found.learner}\n  agent loop: {found.turn_seconds:.2e} s a turn")
        own = statistics.mean(each.seconds_per_step for each in predicted(found, CALIBRATION, chosen.seeds))
        print(f"  the calibration itself, simulated: {own / run.seconds_per_step - 1:+.1%}", flush=True)
        print(f"\n{'':40}predicted  measured             lag predicted  measured")
        for label, shape in SHAPES.items():
            outcomes = predicted(found, shape, chosen.seeds)
            guess = statistics.mean(each.seconds_per_step for each in outcomes)
            lag = statistics.mean(each.mean_lag for each in outcomes)
            run = runs[label].result()
            figures[label] = {"predicted": guess, "measured": run.seconds_per_step}
            print(
                f"{label:40}{guess:8.3f} s{run.seconds_per_step:8.3f} s{guess / run.seconds_per_step - 1:+8.1%}"
                f"{lag:14.2f}{run.lag_mean:10.2f}",
                flush=True,
            )
    worst = max(abs(each["predicted"] / each["measured"] - 1) for each in figures.values())
    print(f"the furthest is {worst:.1%} off, where 10 % are allowed")
    return figures


def in_cpu_time(folder: Path, shape: dict[str, Any], steps: int) -> Real:
    with asyncio.Runner(loop_factory=CpuLoop) as runner:
        return runner.run(real_run(folder, shape, steps))


def describe(shape: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in shape.items())


# ---------------------------------------------------------------- orders


ORDERS = {
    "started, max_lag 2": ("started", 2, 0.0),
    "started, max_lag 4": ("started", 4, 0.0),
    "finished, max_lag 2": ("finished", 2, 0.0),
    "due, max_lag 2 (mean 1)": ("due", 2, 0.0),
    "due, max_lag 4 (mean 2)": ("due", 4, 0.0),
    "due, max_lag 6 (mean 2)": ("due", 6, 2.0),
    "due, max_lag 8 (mean 2)": ("due", 8, 2.0),
}


def compare_orders(chosen: argparse.Namespace) -> dict[str, Any]:
    """Every order under lighter and heavier tails: as a share of what the learner allows, which needs a second for each
    step of 8 groups. A group, the longest of four attempts, takes about a second on average."""
    from turnwise.assemble.run import settings_of

    shape = AttemptShape(prompt=64, action=8, reply=8, turns=4, group=4)
    pace = MeasuredPace(fixed=1e-4, sequence=1e-6, prompt=0.0)
    figures: dict[str, Any] = {}
    steps = 20 if chosen.quick else 60
    for sigma in MEDIAN:
        print(f"\nlognormal environment calls, sigma {sigma}:")
        print(f"  {'':28}of the bound  mean lag  largest  dropped  fair/turns")
        for label, (order, max_lag, mean_lag) in ORDERS.items():
            more = [f"schedule.order={order}", f"max_lag={max_lag}"]
            more += [f"schedule.mean_lag={mean_lag}"] if mean_lag else []
            recipe = load_recipe(RECIPE, [*more, "groups_per_step=8", f"steps={steps}"])
            found = []
            for seed in range(1 if chosen.quick else chosen.seeds):
                workload = ShapedGroups(shape, LognormalDelay(MEDIAN[sigma], sigma), sigma=0.5)
                setup = Setup(pace, LearnerPace(1.0, 0.0, 0.0, 0.0), workload)
                found.append(simulate(setup, settings_of(recipe), seed=seed, skip=steps // 4))
            share = statistics.mean(1 / each.seconds_per_step for each in found)
            names = ("mean_lag", "dropped", "fair_turns")
            lag, dropped, fair = (statistics.mean(getattr(each, name) for each in found) for name in names)
            largest = max(max(each.lags) for each in found)
            figures[f"{sigma} {label}"] = {"share": share, "lag": lag, "largest": largest, "fair": fair}
            print(f"  {label:28}{share:12.1%}{lag:10.2f}{largest:9}{dropped:9.1%}{fair:12.3f}", flush=True)
    return figures


MEDIAN = {1.0: 0.17, 1.5: 0.10}
"""Seconds of an environment call with which the longest of four attempts takes about a step."""


# ---------------------------------------------------------------- cards


RECIPES = ("qwen3-4b-8gpu", "qwen3-8b-8gpu", "qwen3-30b-a3b-16gpu")


def on_cards(chosen: argparse.Namespace) -> dict[str, Any]:
    from turnwise.preflight.card import CARDS
    from turnwise.simulate.table import split_lines

    figures: dict[str, Any] = {}
    for name in RECIPES[:1] if chosen.quick else chosen.recipes:
        print(f"\n{name}")
        figures[name] = []
        for line in split_lines(load_recipe(Path(name)), CARDS[0], chosen.cards):
            figures[name].append(line)
            print(line, flush=True)
    return figures


def main() -> None:
    parts = {"check": check_against_runs, "orders": compare_orders, "cards": on_cards}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(parts), default=list(parts))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of each real run")
    parser.add_argument("--processes", type=int, default=1, help="real runs at a time")
    parser.add_argument("--cards", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--quick", action="store_true", help="few small steps")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    figures = {name: parts[name](chosen) for name in chosen.only}
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
