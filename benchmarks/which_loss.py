"""Which policy loss learns most from the same attempts, when they are fresh and when they are four versions old?

    python benchmarks/which_loss.py [--data benchmarks/data/which-loss.jsonl] [--picture PATH] [--only-report]

Seven losses on a walk of 8 turns (walk.py) with credit grpo and four updates a step, twenty seeds, which share
ways, luck and chances between arms. At lag 4 every turn of step 5 and later is exactly four versions old; its ratio is
anchored on the engine's logprobs, or on the learner's before the step, with and without truncated importance sampling
(TIS, per token, at most 2). All losses are run at the same two learning rates, because they have one gradient where the
ratio is 1 (tests/benchmarks/test_which.py). Every finished run is a line of the data, and one that is there is not made
again. Printed are held-out success after training, the share of right moves over training, differences to ppo_clip seed
by seed, how many seeds end below chance, and for each loss the differences between the anchors.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matrix import Cell, arguments, finished, interval, make, paired, plot, recipe_of, trained
from picture import Picture, title
from walk import World
from which_credit import rights

DATA = Path(__file__).parent / "data" / "which-loss.jsonl"
SEEDS = range(20)
RATES = (1e-2, 3e-3)
WIDE = ("loss.clip_low=0.2", "loss.clip_high=0.28")
LOSSES = {
    "ppo_clip": ("loss.name=ppo_clip", *WIDE),
    "cispo": ("loss.name=cispo",),
    "gspo, turn": ("loss.name=gspo", "loss.scope=turn"),
    "gspo, trajectory": ("loss.name=gspo", "loss.scope=trajectory"),
    "gspo, turn, wide": ("loss.name=gspo", "loss.scope=turn", *WIDE),
    "sapo": ("loss.name=sapo",),
    "dppo": ("loss.name=dppo",),
}
"""Settings are the defaults, but for the bounds of ppo_clip and of gspo with wide ones, which are the quick start's."""
ENGINE, LEARNER = "loss.anchor=engine", "loss.anchor=learner"
AGES = {
    "lag 0": ("max_lag=0", ENGINE),
    "lag 4, engine": ("max_lag=4", ENGINE),
    "lag 4, learner": ("max_lag=4", LEARNER),
    "lag 4, learner, TIS": ("max_lag=4", LEARNER, "correction.importance_sampling=token"),
}
ENGINE_AGE, LEARNER_AGES = "lag 4, engine", ("lag 4, learner, TIS", "lag 4, learner")
CHANCE = 0.25
WORLD = World(turns=8, goal=6, slip=0.1)
STEPS = ("steps=30", "groups_per_step=4", "groups_per_update=1")
Runs = Mapping[tuple[str, str, float], Mapping[int, dict[str, Any]]]
"""Runs by seed, of a loss, an age and a learning rate."""


def run_cell(cell: Cell) -> dict[str, Any]:
    settings = (*LOSSES[cell["loss"]], *AGES[cell["age"]], *STEPS, f"optimizer.learning_rate={cell['rate']}")
    return trained(WORLD, cell["seed"], recipe_of(*settings))


def cell_of(loss: str, age: str, rate: float, seed: int) -> Cell:
    return {"loss": loss, "age": age, "rate": rate, "seed": seed}


def reported() -> list[Cell]:
    """All runs, seed by seed, so that a matrix that is stopped has whole seeds."""
    return [cell_of(loss, age, rate, seed) for rate in RATES for seed in SEEDS for age in AGES for loss in LOSSES]


def by_arm(runs: Sequence[Mapping[str, Any]]) -> Runs:
    found: dict[tuple[str, str, float], dict[int, dict[str, Any]]] = {}
    for run in runs:
        cell = run["cell"]
        if cell["seed"] in SEEDS:
            found.setdefault((cell["loss"], cell["age"], cell["rate"]), {})[cell["seed"]] = dict(run)
    return found


def report(runs: Sequence[Mapping[str, Any]]) -> None:
    arms = by_arm(runs)
    for age in AGES:
        for rate in RATES:
            print(f"\n{age}, learning rate {rate:g}")
            print(
                f"{'':22} {'seeds':>5}  sampled success  greedy success   right in training  minus ppo_clip"
                "     entropy  clipped  largest ratio  below chance"
            )
            for loss in LOSSES:
                of_arm = arms.get((loss, age, rate), {})
                print(f"{loss:22} {len(of_arm):5}  {line_of(of_arm, arms.get(('ppo_clip', age, rate), {}))}")
    print("\nright in training at lag 4, minus the engine's anchor: learner with TIS, learner")
    for rate in RATES:
        for loss in LOSSES:
            at_engine = rights(arms.get((loss, ENGINE_AGE, rate), {}))
            others = [rights(arms.get((loss, age, rate), {})) for age in LEARNER_AGES]
            found = [interval(paired(other, at_engine), "+") for other in others]
            print(f"{loss:22} {rate:g}   {'   '.join(found)}")


def line_of(of_arm: Mapping[int, dict[str, Any]], of_ppo: Mapping[int, dict[str, Any]]) -> str:
    if not of_arm:
        return "missing"
    runs = list(of_arm.values())
    sampled, greedy = ([run["after"][f"{kind}/reached"] for run in runs] for kind in ("sampled", "greedy"))
    curves = rights(of_arm)
    compared = paired(curves, rights(of_ppo))
    entropy = statistics.fmean(run["curve"]["entropy"][-1] for run in runs)
    clipped = statistics.fmean(statistics.fmean(run["curve"].get("clipped", [0.0])) for run in runs)
    below = sum(run["curve"]["right"][-1] < CHANCE for run in runs)
    largest = max(max(run["curve"]["largest ratio"]) for run in runs)
    return (
        f"{interval(sampled)}  {interval(greedy)}  {interval(list(curves.values()))}     {interval(compared, '+')}"
        f"  {entropy:8.3f} {clipped:8.3f}  {largest:8.2f}  {below:8}"
    )


COLORS = ("#222222", "#1f77b4", "#e0a100", "#7b3294", "#d95f02", "#1b9e77", "#c23b75")


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The share of right moves by tenths of training: a panel for each age of the attempts, a row for each rate."""
    arms = by_arm(runs)
    picture = Picture(12, 5.6, len(RATES), len(AGES))
    for row, rate in zip(picture.panels, RATES, strict=True):
        for axes, age in zip(row, AGES, strict=True):
            for loss, color in zip(LOSSES, COLORS, strict=True):
                plot(axes, loss, arms.get((loss, age, rate), {}), color, dashed=loss.startswith("gspo"))
            title(axes, f"{age}\nlearning rate {rate:g}")
    picture.save(path, "tenth of training", "moves that are right", legend="outside right upper")


def main() -> None:
    chosen = arguments(__doc__, DATA)
    if not chosen.only_report:
        make(reported(), chosen.data, run_cell)
    runs = finished(chosen.data)
    report(runs)
    if chosen.picture:
        draw(runs, chosen.picture)


if __name__ == "__main__":
    main()
