"""What recording and watching cost, as a share of a training step at the quick start's size.

    python benchmarks/recording.py [--repeats 3] [--steps 30] [--json FILE]

Trains the quick start and times, in every step: the archive, metrics.jsonl, the checks of `turnwise why`, and the
attempts on the screen; and, apart from those, the metrics from groups, which any trainer computes. Prints the median
over repeats, with the range, of milliseconds a step and of the share of a step. Exit code 1 where recording and
watching reach 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from turnwise.cli.commands import main as turnwise
from turnwise.runs import archive, evaluations, transcript
from turnwise.runs.tracker import JsonLines
from turnwise.runs.why.watcher import Watcher
from turnwise.training import loop, run

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "hops.toml"
LIMIT = 0.02
METRICS = "metrics from groups"
TIMED: dict[str, list[tuple[Any, str]]] = {
    METRICS: [(loop, "describe")],
    "metrics.jsonl": [(JsonLines, "log")],
    "checks of why": [(Watcher, "log")],
    "archive": [(archive, "write_step"), (archive, "prune"), (evaluations, "prune")],
    "attempts on the screen": [(run, "best_and_worst")],
}
"""The functions that are timed, by what they do."""


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            result = function(*arguments, **named)
            return list(result) if function is transcript.best_and_worst else result
        finally:
            spent.append(time.perf_counter() - began)

    return wrapper


def measure(folder: Path, steps: int) -> tuple[dict[str, float], float]:
    """(seconds a step by what they went to, seconds a step in all) of one run."""
    spent: dict[str, list[float]] = {name: [] for name in TIMED}
    originals = [(where, name, getattr(where, name)) for places in TIMED.values() for where, name in places]
    for what, places in TIMED.items():
        for where, name in places:
            setattr(where, name, timed(getattr(where, name), spent[what]))
    settings = [f"steps={steps}", "evaluation.every=0", "evaluation.final_tasks=8", "screen.attempts_every=10"]
    try:
        with redirect_stdout((folder / "log").open("w")):
            assert turnwise(["train", str(RECIPE), f"out={folder / 'run'}", *settings]) == 0
    finally:
        for where, name, original in originals:
            setattr(where, name, original)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    recorded = {name: sum(values) / steps for name, values in spent.items()}
    return recorded, sum(line.get("seconds/step", 0.0) for line in lines) / steps + sum(recorded.values())


def row(name: str, seconds: float, shares: list[float]) -> str:
    middle, low, high = statistics.median(shares), min(shares), max(shares)
    return f"| {name} | {1000 * seconds:.2f} | {middle:.2%} | {low:.2%}, {high:.2%} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args()
    runs = []
    for repeat in range(chosen.repeats):
        with tempfile.TemporaryDirectory(prefix="turnwise-recording-") as folder:
            runs.append(measure(Path(folder), chosen.steps))
        print(f"run {repeat + 1} of {chosen.repeats}: {runs[-1][1] * 1000:.0f} ms a step", file=sys.stderr)
    print("| | ms a step | share of a step | lowest and highest share |\n|---|---|---|---|")
    together = [sum(spent for name, spent in recorded.items() if name != METRICS) for recorded, _ in runs]
    totals = [spent / whole for spent, (_, whole) in zip(together, runs, strict=True)]
    for name in TIMED:
        shares = [recorded[name] / whole for recorded, whole in runs]
        print(row(name, statistics.median(recorded[name] for recorded, _ in runs), shares))
    print(row("all but the metrics from groups", statistics.median(together), totals))
    print(f"\na step: {1000 * statistics.median(whole for _, whole in runs):.0f} ms")
    if chosen.json:
        chosen.json.write_text(json.dumps({"runs": runs}))
    return 0 if statistics.median(totals) < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
