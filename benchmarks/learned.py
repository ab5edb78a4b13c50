"""Is something learned that nobody demonstrated, and which setting decides it?

    python benchmarks/learned.py [--quick] [--json PATH] [--cases NAME ...] [--seeds 0 1 2] [--keep FOLDER]

Every case is a recipe with a few settings changed. Printed are held-out success before and after, sampled and greedy;
for hops, by the links of a task, the share of them that greedy attempts follow; for all, how much of the way training
success went while it trained, by tenths of the run; the attempts that training took, and seconds of CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from turnwise.assemble import run
from turnwise.cli.terminal import PlainScreen
from turnwise.recipe.parse import load_recipe
from turnwise.runs.archive import read_step
from turnwise.runs.evaluations import evaluation_path
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import read_metrics

RECIPES = Path(__file__).parent.parent / "recipes"
QUICK = ("steps=2", "groups_per_step=2", "evaluation.every=0", "evaluation.final_tasks=8", "sft.updates=2")


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe with some of its settings changed."""

    recipe: str
    settings: tuple[str, ...] = ()


SHORT = ("env.0.demonstrated.links=[1,2]", "sft.noise=0.3")
GUESS = (
    "env.0.name=guess",
    "env.0.fresh=true",
    "env.0.tasks={high=32}",
    "sft.noise=1",
    "steps=60",
)
IN_VIEW = (
    "env.0.demonstrated={}",
    "env.0.settings={guesses=4,window=true}",
    "rollout.max_turns=4",
    "evaluation.tasks=128",
    "evaluation.final_tasks=512",
)
CASES = {
    "quickstart": Case("quickstart"),
    "more mistakes": Case("quickstart", ("sft.noise=0.4",)),
    "longer chains": Case("quickstart", ("env.0.tasks.links=[3,5]", "rollout.max_turns=7", "sft.noise=0.35")),
    "longer chains, not announced": Case(
        "quickstart",
        (
            "env.0.settings={window=true,mistakes='seen',announce=false}",
            "env.0.tasks.links=[3,6]",
            "rollout.max_turns=8",
            "sft.noise=0.4",
        ),
    ),
    "one and two links, those left in view": Case(
        "quickstart", ("env.0.tasks.links=[1,4]", "env.0.demonstrated.links=[1,2]", "steps=40")
    ),
    "counting": Case("hops", (*SHORT, "env.0.tasks.links=[1,5]", "env.0.settings={mistakes='half'}", "steps=60")),
    "counting, links are paid": Case(
        "hops", (*SHORT, "env.0.tasks.links=[1,5]", "env.0.settings={mistakes='half',link_reward=0.1}", "steps=60")
    ),
    "guess": Case("hops", (*GUESS, "env.0.settings={guesses=4}", "sft.updates=150")),
    "guess, bounds in view": Case(
        "quickstart", (*GUESS, *IN_VIEW, "sft.updates=300", "steps=120", "evaluation.every=20")
    ),
    "guess, bounds in view, many attempts": Case(
        "quickstart",
        (
            *GUESS,
            *IN_VIEW,
            "sft.updates=600",
            "steps=500",
            "groups_per_step=32",
            "groups_per_update=16",
            "optimizer.learning_rate=5e-4",
            "evaluation.every=50",
        ),
    ),
}
"""By name: what docs/explanation/learning.md compares."""


class Silent(PlainScreen):
    """Says nothing."""

    def say(self, text: str) -> None:
        return None

    def show(self, done: int, metrics: Any) -> None:
        return None


def trained(case: Case, seed: int, out: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One run's figures."""
    recipe = load_recipe(RECIPES / f"{case.recipe}.toml", [*case.settings, f"seed={seed}", f"out={out}", *overrides])
    began = time.process_time()
    summary = asyncio.run(run.start(recipe, Silent(), asyncio.Event()))
    assert summary is not None
    folder = RunFolder.open(out)
    return {
        "before": summary["before"],
        "after": summary["after"],
        "strategy": {
            when: measured(
                evaluation_path(folder.evaluations, version, "greedy"), recipe.env[0].settings.get("guesses", 0)
            )
            for when, version in (("before", 0), ("after", recipe.steps))
        },
        "training": [line["success"] for line in read_metrics(folder.metrics) if "success" in line],
        "attempts": recipe.steps * recipe.groups_per_step * recipe.rollout.group_size,
        "warm_start_attempts": recipe.sft.updates * recipe.sft.batch,
        "cpu_seconds": time.process_time() - began,
    }


def measured(path: Path, guesses: int) -> dict[str, dict[str, float]]:
    """How greedy attempts went about it: of hops by the links of a task, of guess beside bisection of its tasks."""
    of: dict[str, list[dict[str, float]]] = defaultdict(list)
    for record in read_step(path):
        data = record.group.task.data
        for attempt in record.group.trajectories:
            if "links" in data:
                lookups = sum(turn.said.content.startswith("get") for turn in attempt.turns)
                share = attempt.marks.get("links_followed", 0.0)
                of[f"{data['links']} links"].append(
                    {"success": attempt.outcome, "followed": share, "lookups": float(lookups)}
                )
            elif "secret" in data:
                found, used = bisect(data["low"], data["high"], data["secret"], guesses)
                of["all tasks"].append(
                    {
                        "success": attempt.outcome,
                        "of bisection": found,
                        "guesses": float(len(attempt.turns)),
                        "guesses of bisection": float(used),
                        "off the middle": off_the_middle(data["low"], data["high"], attempt.turns[0].said.content),
                    }
                )
    return {
        which: {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
        for which, rows in sorted(of.items())
    }


def bisect(low: int, high: int, secret: int, guesses: int) -> tuple[float, int]:
    """(whether guessing the middle finds the secret, the guesses it used). No strategy finds more numbers on average:
    with k guesses, 2^k - 1 of those between the bounds."""
    for used in range(1, guesses + 1):
        middle = (low + high) // 2
        if middle == secret:
            return 1.0, used
        low, high = (middle + 1, high) if middle < secret else (low, middle - 1)
    return 0.0, guesses


def off_the_middle(low: int, high: int, said: str) -> float:
    """How far a first guess is from the middle, as a share of the way to a bound; 1 where it is no number."""
    try:
        return min(1.0, abs(int(said) - (low + high) / 2) / ((high - low) / 2))
    except ValueError:
        return 1.0


def report(name: str, seeds: Sequence[int], runs: Sequence[dict[str, Any]]) -> None:
    print(f"\n{name}")
    for seed, figures in zip(seeds, runs, strict=True):
        before, after = figures["before"], figures["after"]
        print(
            f"  seed {seed}: greedy {before['greedy']:.3f} -> {after['greedy']:.3f}, sampled "
            f"{before['sampled']:.3f} -> {after['sampled']:.3f}; {figures['attempts']:,} attempts after "
            f"{figures['warm_start_attempts']:,} demonstrations, {figures['cpu_seconds']:.0f} CPU seconds"
        )
        training, tenth = figures["training"], max(1, len(figures["training"]) // 10)
        tenths = [statistics.fmean(training[at : at + tenth]) for at in range(0, len(training), tenth)]
        print(f"    training success by tenths of the run  {' '.join(f'{success:.2f}' for success in tenths)}")
        for when, by_kind in figures["strategy"].items():
            for kind, cells in by_kind.items():
                print(f"    {when:6} {kind}: {', '.join(f'{name} {value:.2f}' for name, value in cells.items())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed and two small steps of each case")
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    seeds, overrides = (chosen.seeds[:1], QUICK) if chosen.quick else (chosen.seeds, ())
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen.cases:
            places = [(chosen.keep or Path(temporary)) / f"{name.replace(' ', '-')}-{seed}" for seed in seeds]
            found[name] = [
                trained(CASES[name], seed, place, overrides) for seed, place in zip(seeds, places, strict=True)
            ]
            report(name, seeds, found[name])
    if chosen.json:
        chosen.json.write_text(json.dumps({"seeds": seeds, "runs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
