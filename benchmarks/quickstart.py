"""Seconds of the quickstart to 0.90 held-out success, by stage, and how much of them is spent inside the model.

    python benchmarks/quickstart.py [--quick] [--json PATH] [--seeds 0 1 2] [--profile]

The clock starts after the warm start and the evaluation before training. "inside" is the model's forward and backward
passes, in the engine and in the learner, and the optimizer; evaluations during training count like everything else.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise import run
from turnwise.build import build, check, set_threads
from turnwise.config import load_recipe
from turnwise.runs.archive import archived_steps, read_step
from turnwise.runs.folder import RunFolder
from turnwise.screen import PlainScreen
from turnwise.types import turns_of

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
GOAL = 0.90


class Stopwatch(PlainScreen):
    """Remembers when the goal was first met."""

    def __init__(self) -> None:
        super().__init__()
        self.run: run.Run | None = None
        self.met: dict[str, float] = {}

    def say(self, text: str) -> None:
        return None

    def show(self, done: int, metrics: Mapping[str, float]) -> None:
        if self.run and not self.met and metrics.get("eval/sampled/success", 0.0) >= GOAL:
            self.met = {"step": done, "at": time.perf_counter(), **self.run.counters()}


async def measure(seed: int, steps: int, folder: Path, profile: cProfile.Profile | None) -> dict[str, float]:
    """One run's figures."""
    recipe = load_recipe(RECIPE, [f"seed={seed}", f"out={folder / f'seed-{seed}'}", f"steps={steps}"])
    check(recipe)
    set_threads(recipe)
    watch = Stopwatch()
    state = run.State()
    began = time.perf_counter()
    model, tokenizer = await run.warm_model(recipe, watch, state.seconds, asyncio.Event())
    warm = time.perf_counter() - began
    own = run.Run(recipe, RunFolder.create(recipe.out, {}), build(recipe, model, tokenizer), state, watch)
    await own.before()
    watch.run = own
    engine: Any = own.parts.engine
    sampled = engine.model.sampled_tokens
    before, start = own.counters(), time.perf_counter()
    if profile:
        profile.enable()
    await own.train(asyncio.Event())
    if profile:
        profile.disable()
    total = time.perf_counter() - start
    spent = {name: value - before[name] for name, value in own.counters().items()}
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
    return {
        "before": summary["before"]["sampled"],
        "after": summary["after"]["sampled"],
        "after_greedy": summary["after"]["greedy"],
        "warm_start": warm,
        "updates_to_goal": watch.met.get("step", float("nan")),
        "seconds_to_goal": watch.met.get("at", float("nan")) - start,
        "total": total,
        "generate": spent["generate"],
        "environment": environment,
        "plan_and_credit": plan,
        "forward_backward": spent["forward_backward"] + spent["score"],
        "optimizer": spent["optimizer"],
        "rest": total - model_seconds - environment - plan,
        "inside": model_seconds / total,
        "sampled_tokens_per_second": (engine.model.sampled_tokens - sampled) / total,
        "trained_tokens_per_second": trained / total,
        "trained_tokens_per_learner_second": trained / (spent["forward_backward"] + spent["optimizer"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--quick", action="store_true", help="one seed, few steps: under a minute once the warm start is cached"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--profile", action="store_true", help="print where Python spends its time, for the last seed")
    chosen = parser.parse_args()
    seeds, steps = (chosen.seeds[:1], 15) if chosen.quick else (chosen.seeds, load_recipe(RECIPE).steps)
    profile = cProfile.Profile() if chosen.profile else None
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            asyncio.run(measure(seed, steps, Path(folder), profile if seed == seeds[-1] else None)) for seed in seeds
        ]
    print(f"{'':36}" + "".join(f"seed {seed:<8}" for seed in seeds) + "median")
    for name in runs[0]:
        values = [figures[name] for figures in runs]
        print(f"{name:36}" + "".join(f"{value:<13.3f}" for value in values) + f"{statistics.median(values):.3f}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"seeds": seeds, "steps": steps, "runs": runs}, indent=2) + "\n")
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
