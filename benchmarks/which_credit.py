"""Which credit estimator learns most from the same attempts, by the horizon of a task and by where luck enters?

    python benchmarks/which_credit.py [--data benchmarks/data/which-credit.jsonl] [--picture PATH] [--only-report]

Seven estimators on three walks (walk.py) of 2, 8 and 24 turns, each paid turn by turn and, with the same totals, all at
the end; twenty seeds, which share ways, luck and chances between arms. The learning rate of an estimator on a walk is
chosen from three by the share of right moves in training on five pilot seeds that are not reported: the lowest within
one standard error of the best. All are also run at one rate, 0.01. Every finished run is a line of the data, and one
that is there is not made again. Printed are held-out success after training, the share of right moves over training,
differences to grpo seed by seed, and CPU seconds; the differences at the one rate; and what the pilots say of rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matrix import Cell, arguments, finished, interval, make, paired, plot, recipe_of, trained
from picture import Picture, title
from walk import World

DATA = Path(__file__).parent / "data" / "which-credit.jsonl"
SEEDS, PILOTS = range(20), range(100, 105)
RATES = (3e-3, 1e-2, 3e-2)
COMMON = 1e-2
"""The learning rate at which all are run besides: what of the order is owed to rates of their own?"""
ESTIMATORS = {
    "grpo": (),
    "rloo": (),
    "reward_to_go": (),
    "turn_baseline": (),
    "gigpo": (),
    "reinforce_pp": ("credit.baseline=true",),
    "gae": ("credit.gamma=1", "credit.lam=0.95", "credit.unit=turn"),
}
TOTALS = ("grpo", "rloo")
"""Estimators that see totals only: the time at which something is paid is nothing to them."""
BEST = ("gigpo", "turn_baseline")
"""Compared with each other too."""
WORLDS = {
    "2 turns, coin at the end": World(turns=2, goal=2, coin=1.0, tossed="last"),
    "8 turns, coin at the start": World(turns=8, goal=6, coin=1.0, tossed="first"),
    "24 turns, moves that slip": World(turns=24, goal=16, slip=0.2),
}
STEPS = 30
GROUPS = {2: 8, 8: 8, 24: 4}
"""Groups of 8 attempts in a step, by turns; two updates a step."""
PAYS = ("turns", "end")
Rates = Mapping[tuple[str, str, str], float]
"""Learning rates by pay, world and estimator."""
Runs = Mapping[tuple[str, str, str], Mapping[int, dict[str, Any]]]
"""Runs by seed, of a world, a pay and an estimator."""


def run_cell(cell: Cell) -> dict[str, Any]:
    world = replace(WORLDS[cell["world"]], pay=cell["pay"])
    rate, groups = cell["rate"], GROUPS[world.turns]
    settings = [
        f"credit.name={cell['estimator']}",
        *ESTIMATORS[cell["estimator"]],
        f"optimizer.learning_rate={rate}",
        f"steps={STEPS}",
        f"groups_per_step={groups}",
        f"groups_per_update={groups // 2}",
    ]
    if cell["estimator"] == "gae":
        settings.append(f"critic.optimizer.learning_rate={rate}")
    return trained(world, cell["seed"], recipe_of(*settings))


def cell_of(world: str, pay: str, estimator: str, rate: float, seed: int) -> Cell:
    return {"world": world, "pay": pay, "estimator": estimator, "rate": rate, "seed": seed}


def arms_to_run() -> list[tuple[str, str, str]]:
    """(pay, world, estimator); estimators that see totals only are run once for both ways of paying."""
    return [
        (pay, world, name)
        for pay in PAYS
        for world in WORLDS
        for name in ESTIMATORS
        if pay == "turns" or name not in TOTALS
    ]


def pilots() -> list[Cell]:
    return [
        cell_of(world, pay, name, rate, seed) for pay, world, name in arms_to_run() for rate in RATES for seed in PILOTS
    ]


def best_rates(runs: Sequence[Mapping[str, Any]]) -> Rates:
    """By pay, walk and estimator: the lowest learning rate whose right moves, mean over the pilot seeds, lie within one
    standard error of the best rate's. Of rates that the pilots do not tell apart, the higher one varies more."""
    scores: dict[tuple[str, str, str], dict[float, list[float]]] = {}
    for run in runs:
        cell = run["cell"]
        if cell["seed"] in PILOTS:
            of_arm = scores.setdefault((cell["pay"], cell["world"], cell["estimator"]), {})
            of_arm.setdefault(cell["rate"], []).append(learned(run))
    return {arm: lowest_of_the_best(of_arm) for arm, of_arm in scores.items()}


def lowest_of_the_best(scores: Mapping[float, Sequence[float]]) -> float:
    """Of rates with their scores."""
    best = max(scores.values(), key=statistics.fmean)
    error = statistics.stdev(best) / len(best) ** 0.5 if len(best) > 1 else 0.0
    return min(rate for rate, found in scores.items() if statistics.fmean(found) >= statistics.fmean(best) - error)


def learned(run: Mapping[str, Any]) -> float:
    """The share of right moves over all of training."""
    return statistics.fmean(run["curve"]["right"])


def rights(of_arm: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """What was learned, by seed."""
    return {seed: learned(run) for seed, run in of_arm.items()}


def reported(rates: Rates) -> list[Cell]:
    """All runs, seed by seed, so that a matrix that is stopped has whole seeds."""
    return [
        cell_of(world, pay, name, rate, seed)
        for seed in SEEDS
        for pay, world, name in arms_to_run()
        for rate in sorted({rates[pay, world, name], COMMON})
    ]


def by_arm(runs: Sequence[Mapping[str, Any]], rates: Rates) -> Runs:
    """The reported runs at these rates; those of estimators that see totals only under both ways of paying."""
    found: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        cell = run["cell"]
        pay, world, name = cell["pay"], cell["world"], cell["estimator"]
        if cell["seed"] in SEEDS and cell["rate"] == rates[pay, world, name]:
            for shown in PAYS if name in TOTALS else (pay,):
                found.setdefault((world, shown, name), {})[cell["seed"]] = dict(run)
    return found


def report(runs: Sequence[Mapping[str, Any]]) -> None:
    rates = best_rates(runs)
    arms, alike = by_arm(runs, rates), by_arm(runs, dict.fromkeys(rates, COMMON))
    for world in WORLDS:
        for pay in PAYS:
            print(f"\n{world}; paid {'turn by turn' if pay == 'turns' else 'at the end'}")
            print(f"{'':14} {'rate':>5} {'seeds':>5}  sampled success  greedy success   right in training  minus grpo")
            for name in ESTIMATORS:
                of_arm = arms.get((world, pay, name), {})
                rate = rates.get(("turns" if name in TOTALS else pay, world, name), 0)
                print(f"{name:14} {rate:5g} {len(of_arm):5}  {line_of(arms, world, pay, name)}")

    print("\nright in training, minus grpo, mean over the three walks: paid turn by turn, paid at the end; all at 0.01")
    for name in ESTIMATORS:
        found = [interval(over_walks(some, pay, name), "+") for some in (arms, alike) for pay in PAYS]
        print(f"{name:14} {'   '.join(found)}")
    print("\nright in training, gigpo minus turn_baseline: at rates of their own, both at 0.01")
    for world, pay in ((world, pay) for pay in PAYS for world in WORLDS):
        compared = [paired(*(rights(some.get((world, pay, name), {})) for name in BEST)) for some in (arms, alike)]
        print(f"{'   '.join(interval(values, '+') for values in compared)}   {world}, paid by {pay}")
    print(f"\nthose that have another rate, all at {COMMON:g}")
    for pay, world, name in (arm for arm in rates if rates[arm] != COMMON):
        print(f"{name:14} {line_of(alike, world, pay, name)}   {world}, paid by {pay}")
    report_pilots(runs)


def report_pilots(runs: Sequence[Mapping[str, Any]]) -> None:
    rates = best_rates(runs)
    print(f"\nright in training, five pilot seeds, at {', '.join(f'{rate:g}' for rate in RATES)}; and the rate chosen")
    for arm in arms_to_run():
        cells = [(run["cell"], learned(run)) for run in runs if run["cell"]["seed"] in PILOTS]
        found = [
            interval([right for cell, right in cells if cell == cell_of(arm[1], arm[0], arm[2], rate, cell["seed"])])
            for rate in RATES
        ]
        print(f"{arm[2]:14} {'   '.join(found)}   {rates[arm]:g}   {arm[1]}, paid by {arm[0]}")


def over_walks(arms: Runs, pay: str, name: str) -> list[float]:
    """By seed, the mean over the walks of the difference to grpo; only seeds that have all walks."""
    by_walk = []
    for world in WORLDS:
        of_arm, of_grpo = rights(arms.get((world, pay, name), {})), rights(arms.get((world, pay, "grpo"), {}))
        by_walk.append({seed: of_arm[seed] - of_grpo[seed] for seed in of_arm if seed in of_grpo})
    whole = sorted(set.intersection(*(set(of_walk) for of_walk in by_walk)))
    return [statistics.fmean(of_walk[seed] for of_walk in by_walk) for seed in whole]


def line_of(arms: Runs, world: str, pay: str, name: str) -> str:
    of_arm, of_grpo = arms.get((world, pay, name), {}), arms.get((world, pay, "grpo"), {})
    if not of_arm:
        return "missing"
    sampled, greedy = ([run["after"][f"{kind}/reached"] for run in of_arm.values()] for kind in ("sampled", "greedy"))
    curves = rights(of_arm)
    compared = paired(curves, rights(of_grpo))
    seconds = statistics.fmean(run["cpu_seconds"] for run in of_arm.values())
    return (
        f"{interval(sampled)}  {interval(greedy)}  {interval(list(curves.values()))}     {interval(compared, '+')}"
        f"   {seconds:.1f} CPU seconds"
    )


COLORS = ("#666666", "#1f77b4", "#7b3294", "#1b9e77", "#d95f02", "#c23b75", "#222222")


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The share of right moves by tenths of training: a walk a column, a way of paying that was run a row."""
    arms = by_arm(runs, best_rates(runs))
    pays = [pay for pay in PAYS if any(way == pay and name not in TOTALS for _, way, name in arms)]
    picture = Picture(11, 0.5 + 3.2 * len(pays), len(pays), len(WORLDS))
    for row, pay in zip(picture.panels, pays, strict=True):
        for axes, world in zip(row, WORLDS, strict=True):
            for name, color in zip(ESTIMATORS, COLORS, strict=True):
                plot(axes, name, arms.get((world, pay, name), {}), color, dashed=name in TOTALS)
            title(axes, f"{world}\npaid {'by turn' if pay == 'turns' else 'at the end'}")
    picture.save(path, "tenth of training", "moves that are right", legend="upper left")


def main() -> None:
    chosen = arguments(__doc__, DATA)
    if not chosen.only_report:
        make(pilots(), chosen.data, run_cell)
        make(reported(best_rates(finished(chosen.data))), chosen.data, run_cell)
    runs = finished(chosen.data)
    report(runs)
    if chosen.picture:
        draw(runs, chosen.picture)


if __name__ == "__main__":
    main()
