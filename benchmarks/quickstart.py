"""Seconds of the quickstart to 0.90 held-out success, by stage, and how much of them is spent inside the model.

    python benchmarks/quickstart.py [--quick] [--json PATH] [--seeds 0 1 2] [--lags 0 2] [--profile]

The clock starts after the warm start and the evaluation before training. "inside" is the model's forward and backward
passes, in the engine and in the learner, and the optimizer; evaluations during training count like everything else.
"evaluation_share" is their share of the total. Shares of the steps alone, without evaluations: "engine_share" is what
the engine takes besides the model, to schedule and to sample; "loop_share" what is neither the engine's nor the
learner's nor in environments, plans and credit.
With lag the engine and the learner overlap, so that their seconds may add up to more than the total.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from turnwise.assemble.checks import check
from turnwise.assemble.model import set_threads
from turnwise.assemble.run import started
from turnwise.cli.terminal import PlainScreen
from turnwise.envs.base import Reply
from turnwise.envs.hops import Hops
from turnwise.recipe.parse import load_recipe
from turnwise.runs.archive import archived_steps, read_step
from turnwise.runs.folder import RunFolder
from turnwise.training.run import Run
from turnwise.types import Task, turns_of

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
GOAL = 0.90
QUICK = ["steps=5", "evaluation.final_tasks=32", "sft.updates=8"]


class Stopwatch(PlainScreen):
    """Remembers when the goal was first met."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Run | None = None
        self.met: dict[str, float] = {}

    def say(self, text: str) -> None:
        return None

    def show(self, done: int, metrics: Mapping[str, float]) -> None:
        if self.run and not self.met and metrics.get("eval/sampled/success", 0.0) >= GOAL:
            self.met = {"step": done, "at": time.perf_counter(), **self.run.model_seconds()}


class Unmeasured:
    """Seconds of training's steps that no metric has: those of the engine's steps, with scheduling and sampling, and of
    opening environments. Evaluations are left out."""

    def __init__(self, run: Run) -> None:
        self.engine = self.opening = 0.0
        self.evaluating = False
        model: Any = run.parts.loop.engine.model  # type: ignore[attr-defined]
        step, evaluate, open_hops = model.step, run.evaluate, Hops.open

        def step_timed() -> Any:
            began = time.perf_counter()
            finished = step()
            self.engine += 0.0 if self.evaluating else time.perf_counter() - began
            return finished

        async def open_timed(environment: Hops, task: Task) -> Reply:
            began = time.perf_counter()
            reply = await open_hops(environment, task)
            self.opening += 0.0 if self.evaluating else time.perf_counter() - began
            return reply

        async def evaluate_apart() -> dict[str, float]:
            self.evaluating = True
            metrics = await evaluate()
            self.evaluating = False
            return metrics

        model.step, run.evaluate = step_timed, evaluate_apart
        self.of_hops = patch.object(Hops, "open", open_timed)


async def measure(
    seed: int, lag: int, overrides: Sequence[str], folder: Path, profile: cProfile.Profile | None
) -> dict[str, float]:
    """One run's figures."""
    out = folder / f"seed-{seed}-lag-{lag}"
    recipe = load_recipe(RECIPE, [f"seed={seed}", f"max_lag={lag}", f"out={out}", *overrides])
    check(recipe)
    set_threads(recipe)
    watch = Stopwatch()
    began = time.perf_counter()
    async with started(recipe, RunFolder.create(recipe.out, {}), watch, asyncio.Event()) as own:
        warm = time.perf_counter() - began
        await own.before()
        watch.run = own
        engine: Any = own.parts.loop.engine
        apart = Unmeasured(own)
        sampled, evaluated = engine.model.sampled_tokens, own.state.seconds.get("evaluate", 0.0)
        before, start = own.model_seconds(), time.perf_counter()
        if profile:
            profile.enable()
        with apart.of_hops:
            await own.train(asyncio.Event())
        if profile:
            profile.disable()
        total = time.perf_counter() - start
        evaluation = own.state.seconds["evaluate"] - evaluated
        spent = {name: value - before[name] for name, value in own.model_seconds().items()}
        summary = own.finish()
    records = [
        r
        for step in archived_steps(own.folder.archive)
        for r in read_step(own.folder.archive / f"step-{step:06d}.parquet")
    ]
    environment = sum(turn.timing.environment for turn in turns_of([record.group for record in records]))
    lines = [json.loads(line) for line in own.folder.metrics.read_text().splitlines()][1:]
    trained = sum(line["tokens/planned"] for line in lines)
    plan = sum(line["seconds/plan_and_credit"] for line in lines)
    model_seconds = sum(spent.values())
    steps = sum(line["seconds/step"] for line in lines)
    in_steps = sum(line.get(f"seconds/{name}", 0.0) for line in lines for name in spent)
    generated = sum(line["seconds/generate"] for line in lines)
    return {
        "before": summary["before"]["sampled"],
        "after": summary["after"]["sampled"],
        "before_greedy": summary["before"]["greedy"],
        "after_greedy": summary["after"]["greedy"],
        **{f"{name}_{when}": value for when in ("before", "after") for name, value in summary["marks"][when].items()},
        "warm_start": warm,
        "updates_to_goal": watch.met.get("step", float("nan")),
        "seconds_to_goal": watch.met.get("at", float("nan")) - start,
        "lag_max": summary["lag_max"],
        "total": total,
        "generate": spent["generate"],
        "environment": environment,
        "plan_and_credit": plan,
        "forward_backward": spent["forward_backward"] + spent["score"],
        "optimizer": spent["optimizer"],
        "rest": max(0.0, total - model_seconds - environment - plan),
        "inside": model_seconds / total,
        "evaluation_share": evaluation / total,
        "engine_share": (apart.engine - generated) / steps,
        "loop_share": (steps - apart.engine - (in_steps - generated) - environment - apart.opening - plan) / steps,
        "sampled_tokens_per_second": (engine.model.sampled_tokens - sampled) / total,
        "trained_tokens_per_second": trained / total,
        "trained_tokens_per_learner_second": trained / (spent["forward_backward"] + spent["optimizer"]),
    }


def report(lag: int, seeds: list[int], runs: list[dict[str, float]]) -> None:
    print(f"\nmax_lag = {lag:<26}" + "".join(f"seed {seed:<8}" for seed in seeds) + "median")
    for name in runs[0]:
        values = [figures[name] for figures in runs]
        print(f"{name:36}" + "".join(f"{value:<13.3f}" for value in values) + f"{statistics.median(values):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lags", type=int, nargs="+", default=[0], help="values of max_lag to compare")
    parser.add_argument("--quick", action="store_true", help="one seed, few small steps: under a minute")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--profile", action="store_true", help="print where Python spends its time, for the last run")
    chosen = parser.parse_args()
    seeds, overrides = (chosen.seeds[:1], QUICK) if chosen.quick else (chosen.seeds, [])
    runs: dict[int, list[dict[str, float]]] = {lag: [] for lag in chosen.lags}
    profile = None
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for lag in chosen.lags:
                last = seed == seeds[-1] and lag == chosen.lags[-1]
                profile = cProfile.Profile() if chosen.profile and last else None
                runs[lag].append(asyncio.run(measure(seed, lag, overrides, Path(folder), profile)))
    for lag, figures in runs.items():
        report(lag, seeds, figures)
    for lag in chosen.lags[1:]:
        pairs = zip(runs[lag], runs[chosen.lags[0]], strict=True)
        ratios = [late["updates_to_goal"] / prompt["updates_to_goal"] for late, prompt in pairs]
        print(f"\nupdates to {GOAL}, max_lag = {lag} against {chosen.lags[0]}: ", end="")
        print(" ".join(f"{ratio:.2f}" for ratio in ratios), f"median {statistics.median(ratios):.2f}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"seeds": seeds, "settings": overrides, "runs": runs}, indent=2) + "\n")
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
