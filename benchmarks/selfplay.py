"""What self-play does to the win rate against an opponent that plays at random, on held-out games.

    python benchmarks/selfplay.py [--quick] [--json PATH] [--seeds 0 1 2] [--runs FOLDER]

Trains recipes/selfplay.toml once per seed and prints, before and after training, the win rate over 256 held-out games
with its 95 % interval (Wilson), how many games ended by an illegal move of the model, and the win rate in the other
games. --runs reads finished runs instead (FOLDER/SEED): nothing is trained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from turnwise.assemble.run import start
from turnwise.cli.terminal import PlainScreen
from turnwise.recipe.parse import load_recipe
from turnwise.runs.archive import read_step
from turnwise.runs.interval import wilson
from turnwise.types import Trajectory

RECIPE = Path(__file__).parent.parent / "recipes" / "selfplay.toml"
QUICK = ["steps=2", "groups_per_step=2", "evaluation.final_tasks=8", "sft.updates=4"]


def train(seed: int, folder: Path, overrides: Sequence[str]) -> None:
    recipe = load_recipe(RECIPE, [f"seed={seed}", f"out={folder}", *overrides])
    asyncio.run(start(recipe, PlainScreen(), asyncio.Event()))


def games(folder: Path, step: int, kind: str) -> list[Trajectory]:
    """The held-out games of one evaluation."""
    records = read_step(folder / "evaluations" / f"step-{step:06d}-{kind}.parquet")
    return [one for record in records for one in (*record.group.trajectories, *record.group.failed)]


def figures(played: Sequence[Trajectory]) -> dict[str, float]:
    wins = sum(one.outcome >= 1 for one in played)
    legal = [one for one in played if not one.marks.get("invalid_move")]
    low, high = wilson(wins, len(played))
    legal_wins = sum(one.outcome >= 1 for one in legal)
    legal_low, legal_high = wilson(legal_wins, len(legal))
    return {
        "games": len(played),
        "won": wins / len(played),
        "low": low,
        "high": high,
        "illegal": 1 - len(legal) / len(played),
        "won_of_legal": legal_wins / max(1, len(legal)),
        "legal_low": legal_low,
        "legal_high": legal_high,
    }


def last_step(folder: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in (folder / "evaluations").glob("step-*-sampled.parquet"))


def measured(seed: int, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for when, step in (("before", 0), ("after", last_step(folder))):
        for kind in ("sampled", "greedy"):
            rows.append({"seed": seed, "when": when, "kind": kind, **figures(games(folder, step, kind))})
    return rows


def shown(row: dict[str, Any]) -> str:
    return (
        f"seed {row['seed']}  {row['when']:6s}  {row['kind']:7s}"
        f"  won {row['won']:.3f} [{row['low']:.3f}, {row['high']:.3f}] of {row['games']:.0f}"
        f"  ended by an illegal move {row['illegal']:.3f}"
        f"  won of the others {row['won_of_legal']:.3f} [{row['legal_low']:.3f}, {row['legal_high']:.3f}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, help="a folder with a finished run for each seed")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in arguments.seeds:
            folder = (arguments.runs or Path(scratch)) / str(seed)
            if arguments.runs is None:
                train(seed, folder, QUICK if arguments.quick else [])
            rows += measured(seed, folder)
    for row in rows:
        print(shown(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
