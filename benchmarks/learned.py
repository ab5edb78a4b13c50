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
HASTY = (
    "env.0.settings.lookups=1",
    "env.0.demonstrated={}",
    "rollout.max_turns=6",
    "sft.updates=120",
)
GUESS = (
    "env.0.name=guess",
    "env.0.settings={guesses=4}",
    "sft.noise=1",
    "sft.updates=150",
    "optimizer.schedule=constant",
)
CASES = {
    "quickstart": Case("quickstart"),
    "longer chains": Case("quickstart", ("env.0.tasks.links=[2,5]", "rollout.max_turns=6", "sft.updates=80")),
    "hasty": Case("quickstart", HASTY),
    "hasty, links are paid": Case("quickstart", (*HASTY, "env.0.settings.link_reward=0.1")),
    "counting, whole mistakes": Case("hops", (*SHORT, "steps=60")),
    "counting": Case("hops", (*SHORT, "env.0.tasks.links=[1,5]", "env.0.settings={mistakes='half'}", "steps=60")),
    "counting, links are paid": Case(
        "hops", (*SHORT, "env.0.tasks.links=[1,5]", "env.0.settings={mistakes='half',link_reward=0.1}", "steps=60")
    ),
    "guess, few tasks": Case("hops", (*GUESS, "env.0.tasks={high=32}", "steps=60")),
    "guess, many tasks": Case("hops", (*GUESS, "env.0.tasks={high=32,count=4000}", "steps=60")),
    "guess, fresh tasks": Case("hops", (*GUESS, "env.0.tasks={high=32}", "env.0.fresh=true", "steps=60")),
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
        "followed": {
            when: followed(evaluation_path(folder.evaluations, version, "greedy"))
            for when, version in (("before", 0), ("after", recipe.steps))
        },
        "training": [line["success"] for line in read_metrics(folder.metrics) if "success" in line],
        "attempts": recipe.steps * recipe.groups_per_step * recipe.rollout.group_size,
        "warm_start_attempts": recipe.sft.updates * recipe.sft.batch,
        "cpu_seconds": time.process_time() - began,
    }


def followed(path: Path) -> dict[int, tuple[float, float]]:
    """By the links of a task: (the share of them that was followed, success) of greedy attempts."""
    shares: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for record in read_step(path):
        for attempt in record.group.trajectories:
            if "links" in record.group.task.data:
                share = attempt.marks.get("links_followed", 0.0)
                shares[int(record.group.task.data["links"])].append((share, attempt.outcome))
    return {
        links: (statistics.fmean(share for share, _ in of), statistics.fmean(outcome for _, outcome in of))
        for links, of in sorted(shares.items())
    }


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
        for when, by_links in figures["followed"].items():
            if not by_links:
                continue
            cells = [f"{links}: {share:.2f} ({success:.2f})" for links, (share, success) in by_links.items()]
            print(f"    {when:6} links: share followed (success)  {'   '.join(cells)}")


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
