"""Learning curves of two comparisons on `hops`, with the same warm start, tasks and settings for both arms of a seed.

    python benchmarks/curves.py [--quick] [--only layout] [--seeds 0 1 2] [--steps 30] [--json PATH] [--out FOLDER]

layout: one row per turn against one row per whole trajectory: the same groups, credit and weights, laid out otherwise.
        History only grows, so that every turn stands in its trajectory's last prompt; the script checks that it does.
credit: all turns against the last turn of each attempt alone, where the environment rewrites history. The second arm
        is a fault of another system, made again here: the advantages of all other turns are zero.

Success is that of held-out attempts sampled at temperature 1. Intervals are 95 % t-intervals over seeds: of the mean,
and of the mean difference between the arms of a seed. With --out, a picture of each comparison is written.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

import numpy as np
from picture import Picture

from turnwise.assemble.checks import check
from turnwise.assemble.model import set_threads
from turnwise.assemble.run import started
from turnwise.cli.terminal import PlainScreen
from turnwise.plan.pack import fill, lay_out, pack
from turnwise.plan.plan import Plan
from turnwise.recipe.parse import load_recipe
from turnwise.runs.curve import INK, MUTED
from turnwise.runs.folder import RunFolder
from turnwise.runs.interval import half_width
from turnwise.runs.tracker import read_metrics
from turnwise.tokens import extends
from turnwise.training.loop import Stages
from turnwise.types import Group, Turn, turns_of

RECIPE = Path(__file__).parent.parent / "recipes" / "hops.toml"
GOAL = 0.90
SETTINGS = ["model.threads=1", "evaluation.tasks=256", "evaluation.final_tasks=256"]
QUICK = ["steps=3", "groups_per_step=4", "evaluation.tasks=16", "evaluation.final_tasks=16", "sft.updates=8"]


# ---------------------------------------------------------------- one row per trajectory


def merge(turns: Sequence[Turn], tokens_per_pass: int) -> list[Plan]:
    """Plans with one chain per attempt: its last prompt and action, with every turn's action in its place."""
    rows = [row for row in rows_of(turns) if any(len(turns[place].action) for place in row)]
    lasts = [turns[row[-1]] for row in rows]
    lengths = np.array([len(last.prompt) + len(last.action) for last in lasts], np.int64)
    if len(rows) and (longest := int(lengths.max())) > tokens_per_pass:
        raise ValueError(f"a row has {longest} tokens, more than tokens_per_pass = {tokens_per_pass}; raise it")
    parts = fill(np.argsort(lengths, kind="stable"), lengths, tokens_per_pass)
    return [lay_out_rows(turns, [rows[place] for place in part]) for part in parts]


def rows_of(turns: Sequence[Turn]) -> list[range]:
    """Stretches of turns in which every prompt begins with the whole turn before it, and goes on."""
    starts = [place for place in range(len(turns)) if place == 0 or not continues(turns[place], turns[place - 1])]
    return [range(start, end) for start, end in pairwise([*starts, len(turns)])]


def continues(turn: Turn, before: Turn) -> bool:
    return len(turn.prompt) > len(before.prompt) + len(before.action) and extends(turn, before)


def lay_out_rows(turns: Sequence[Turn], rows: Sequence[range]) -> Plan:
    """One plan with a chain for each row."""
    chains = lay_out(turns, np.array([row[-1] for row in rows], np.int64))
    starts = np.flatnonzero(chains.parent < 0)
    trained = [(i, int(start)) for row, start in zip(rows, starts, strict=True) for i in row if len(turns[i].action)]
    nodes = [start + len(turns[i].prompt) + np.arange(len(turns[i].action)) for i, start in trained]
    return replace(
        chains,
        turns=np.array([i for i, _ in trained], np.int64),
        offsets=np.concatenate(([0], np.cumsum([len(turns[i].action) for i, _ in trained]))).astype(np.int64),
        action_nodes=np.concatenate([np.zeros(0, np.int64), *nodes]),
    )


# ---------------------------------------------------------------- arms


def as_it_is(stages: Stages, tokens_per_pass: int) -> Stages:
    return stages


def single_turns(stages: Stages, tokens_per_pass: int) -> Stages:
    """The stages with one row per turn."""
    return replace(stages, plan=lambda turns: pack(turns, tokens_per_pass))


def whole_trajectories(stages: Stages, tokens_per_pass: int) -> Stages:
    """The stages with one row per attempt. That rows are attempts is checked in every step."""

    def estimate(groups: Sequence[Group], scores: Mapping[str, Any]) -> Any:
        attempts = [len(trajectory.turns) for group in groups for trajectory in group.trajectories]
        if [len(row) for row in rows_of(list(turns_of(groups)))] != attempts:
            raise ValueError(
                "a prompt does not begin with the turn before it; rows of whole attempts need history that grows"
            )
        return stages.estimate(groups, scores)

    return replace(stages, plan=lambda turns: merge(turns, tokens_per_pass), estimate=estimate)


def last_turns(stages: Stages, tokens_per_pass: int) -> Stages:
    """The stages with credit on the last turn of each attempt and zeros on the others."""

    def estimate(groups: Sequence[Group], scores: Mapping[str, Any]) -> Any:
        credit = iter(stages.estimate(groups, scores))
        attempts = [trajectory for group in groups for trajectory in group.trajectories]
        return [next(credit) * (turn is attempt.turns[-1]) for attempt in attempts for turn in attempt.turns]

    return replace(stages, estimate=estimate)


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    label: str
    change: Callable[[Stages, int], Stages]
    color: str


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    title: str
    overrides: tuple[str, ...]
    arms: tuple[Arm, Arm]


COMPARISONS = {
    "layout": Comparison(
        "layout",
        "hops, history grows: rows are turns or whole trajectories",
        (),
        (
            Arm("turns", "one row per turn", single_turns, "#4c78a8"),
            Arm("trajectories", "one row per trajectory", whole_trajectories, "#e07b39"),
        ),
    ),
    "credit": Comparison(
        "credit",
        "hops, history is rewritten: credit on all turns or on the last",
        ("env.0.settings.window=true",),
        (
            Arm("all", "credit on all turns", as_it_is, "#4c78a8"),
            Arm("last", "credit on last turns only", last_turns, "#e07b39"),
        ),
    ),
}


# ---------------------------------------------------------------- one run


@dataclass(slots=True)
class Ledger:
    """What passed through a run: turns, those without credit, and a digest of every step's attempts."""

    turns: int = 0
    without_credit: int = 0
    compared: int = 0
    """Turns of groups whose attempts were paid differently: those in which a turn can have credit."""
    compared_without_credit: int = 0
    later: int = 0
    """Turns after the first of their attempt."""
    continuing: int = 0
    """Those whose prompt begins with the whole turn before and goes on."""
    attempts: list[str] = field(default_factory=list)

    def watch(self, stages: Stages) -> Stages:
        def estimate(groups: Sequence[Group], scores: Mapping[str, Any]) -> Any:
            credit = stages.estimate(groups, scores)
            self.note(groups, [bool(np.any(of_turn)) for of_turn in credit])
            return credit

        return replace(stages, estimate=estimate)

    def note(self, groups: Sequence[Group], credited: Sequence[bool]) -> None:
        digest = hashlib.blake2b(digest_size=8)
        place = iter(credited)
        for group in groups:
            comparable = len({trajectory.total for trajectory in group.trajectories}) > 1
            for turn in turns_of([group]):
                missing = not next(place)
                self.turns += 1
                self.without_credit += missing
                self.compared += comparable
                self.compared_without_credit += missing and comparable
                digest.update(turn.prompt.tobytes() + turn.action.tobytes())
            for trajectory in group.trajectories:
                for before, turn in pairwise(trajectory.turns):
                    self.later += 1
                    self.continuing += continues(turn, before)
        self.attempts.append(digest.hexdigest())


class Lines(PlainScreen):
    """Progress lines that say which run they are of."""

    def __init__(self, who: str) -> None:
        super().__init__(seconds=20.0)
        self.who = who

    def say(self, text: str) -> None:
        print(f"{self.who}: {text}", flush=True)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        super().begin(f"{self.who}: {what}", total, done)


async def measure(
    comparison: Comparison, arm: Arm, seed: int, overrides: Sequence[str], folder: Path
) -> dict[str, Any]:
    """The curve of one run and its other figures."""
    out = folder / f"{comparison.name}-{arm.name}-{seed}"
    recipe = load_recipe(RECIPE, [*SETTINGS, *comparison.overrides, f"seed={seed}", f"out={out}", *overrides])
    check(recipe)
    set_threads(recipe)
    screen = Lines(f"{comparison.name} {arm.name} seed {seed}")
    ledger = Ledger()
    async with started(recipe, RunFolder.create(recipe.out, {}), screen, asyncio.Event()) as own:
        loop = own.parts.loop
        watched = ledger.watch(arm.change(loop.stages, recipe.max_tokens_per_microbatch))
        own.parts = replace(own.parts, loop=replace(loop, stages=watched))
        await own.before()
        began = time.perf_counter()
        await own.train(asyncio.Event())
        seconds = time.perf_counter() - began
    lines = read_metrics(own.folder.metrics)
    trained = lines[1:]
    curve = {int(line["step"]): line["eval/sampled/success"] for line in lines if "eval/sampled/success" in line}
    return {
        "curve": curve,
        "to_goal": next((step for step, success in curve.items() if success >= GOAL), None),
        "final": lines[-1]["eval/sampled/success"],
        "final_greedy": lines[-1]["eval/greedy/success"],
        "final_too_many_turns": lines[-1]["eval/sampled/status/too_many_turns"] / lines[-1]["eval/sampled/attempts"],
        "loss": [line["loss"] for line in trained],
        "gradient_norm": [line["gradient_norm"] for line in trained],
        "attempts": ledger.attempts,
        "tokens_planned": mean([line["tokens/planned"] for line in trained]),
        "tokens_action": mean([line["tokens/action"] for line in trained]),
        "turns_per_attempt": mean([line["trajectory/turns"] for line in trained]),
        "prompts_continue": ledger.continuing / max(1, ledger.later),
        "without_credit": ledger.without_credit / ledger.turns,
        "compared_without_credit": ledger.compared_without_credit / max(1, ledger.compared),
        "seconds": seconds,
        "learner_seconds": sum(own.parts.loop.learner.seconds.values()),
    }


# ---------------------------------------------------------------- figures


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def report(comparison: Comparison, seeds: Sequence[int], runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print the curves and what the arms of each seed have in common."""
    one, other = (runs[arm.name] for arm in comparison.arms)
    steps = list(one[0]["curve"])
    print(f"\n{comparison.title}\nheld-out success; +- is half of a 95 % t-interval over seeds\n")
    print(f"{'step':28}" + "".join(f"{step:<8}" for step in steps) + f"first >= {GOAL:.2f}")
    for arm in comparison.arms:
        for seed, figures in zip(seeds, runs[arm.name], strict=True):
            goal = "never" if figures["to_goal"] is None else figures["to_goal"]
            values = "".join(f"{figures['curve'][step]:<8.3f}" for step in steps)
            print(f"{f'{arm.name}, seed {seed}':28}{values}{goal}")
        show_mean(f"{arm.name}, mean", [[figures["curve"][step] for figures in runs[arm.name]] for step in steps])
    pairs = list(zip(one, other, strict=True))
    show_mean(
        f"{comparison.arms[0].name} - {comparison.arms[1].name}, mean",
        [[a["curve"][step] - b["curve"][step] for a, b in pairs] for step in steps],
    )
    print(f"\n{'':28}" + "".join(f"{name:>16}" for name in [arm.name for arm in comparison.arms]))
    for name, form in (
        ("final", ".3f"),
        ("final_greedy", ".3f"),
        ("final_too_many_turns", ".3f"),
        ("tokens_planned", ",.0f"),
        ("tokens_action", ",.0f"),
        ("turns_per_attempt", ".2f"),
        ("prompts_continue", ".3f"),
        ("without_credit", ".3f"),
        ("compared_without_credit", ".3f"),
        ("seconds", ".0f"),
        ("learner_seconds", ".0f"),
    ):
        columns = ([figures[name] for figures in arm] for arm in (one, other))
        print(f"{name:28}" + "".join(f"{mean(column):>16{form}}" for column in columns))
    for seed, (a, b) in zip(seeds, pairs, strict=True):
        print(f"seed {seed}: {in_common(a, b)}")


def show_mean(name: str, values: Sequence[Sequence[float]]) -> None:
    """Two lines: the mean at every evaluation and half of its interval."""
    print(f"{name:28}" + "".join(f"{mean(at):<8.3f}" for at in values))
    if len(values[0]) > 1:
        print(f"{'   +-':28}" + "".join(f"{half_width(at):<8.3f}" for at in values))


def in_common(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """How the first steps of two runs compare, and how long they sampled the same attempts."""
    pairs = zip(a["attempts"], b["attempts"], strict=True)
    same = next((step for step, (x, y) in enumerate(pairs) if x != y), len(a["attempts"]))
    loss, norm = (relative(a[name][0], b[name][0]) for name in ("loss", "gradient_norm"))
    return (
        f"the first {same} of {len(a['attempts'])} steps sample the same attempts; in the first, loss "
        f"{a['loss'][0]:.7f} and {b['loss'][0]:.7f} (relative difference {loss:.1e}), gradient norm "
        f"{a['gradient_norm'][0]:.7f} and {b['gradient_norm'][0]:.7f} ({norm:.1e})"
    )


def draw(comparison: Comparison, runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Write an SVG: the seeds of each arm as thin lines, their mean and its interval."""
    picture = Picture(9, 5.2)
    axes = picture.panels[0][0]
    axes.set_title(comparison.title, loc="left", fontsize=14, fontweight="bold", color=INK, pad=14)
    # The second arm is thin and dashed, so that the first shows where they coincide.
    styles: Sequence[dict[str, Any]] = (
        {"linewidth": 3.6, "marker": "o", "markersize": 9},
        {"linewidth": 1.6, "marker": "D", "markersize": 5, "linestyle": (0, (3, 2))},
    )
    for arm, style in zip(comparison.arms, styles, strict=True):
        curves = [figures["curve"] for figures in runs[arm.name]]
        steps = list(curves[0])
        values = [[curve[step] for curve in curves] for step in steps]
        middle = np.array([mean(at) for at in values])
        for curve in curves:
            axes.plot(steps, list(curve.values()), color=arm.color, alpha=0.35, linewidth=1)
        if len(curves) > 1:
            half = np.array([half_width(at) for at in values])
            low, high = np.clip(middle - half, 0, 1), np.clip(middle + half, 0, 1)
            axes.fill_between(steps, low, high, color=arm.color, alpha=0.15, linewidth=0)
        axes.plot(steps, middle, color=arm.color, label=arm.label, clip_on=False, **style)
    axes.axhline(GOAL, color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
    picture.save(path, "step", "held-out attempts that succeed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, default=list(COMPARISONS), help="which comparisons")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, default=30, help="training steps of every run; there is an evaluation every 5"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed, three small steps: under a minute, nothing to conclude from"
    )
    parser.add_argument("--json", type=Path, help="write all figures here, after every run")
    parser.add_argument("--out", type=Path, help="draw curves-layout.svg and curves-credit.svg in this folder")
    chosen = parser.parse_args()
    seeds = chosen.seeds[:1] if chosen.quick else chosen.seeds
    overrides = QUICK if chosen.quick else [f"steps={chosen.steps}"]
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for comparison in (COMPARISONS[name] for name in chosen.only):
            runs = results[comparison.name] = {arm.name: [] for arm in comparison.arms}
            for seed in seeds:
                for arm in comparison.arms:
                    runs[arm.name].append(asyncio.run(measure(comparison, arm, seed, overrides, Path(folder))))
                    if chosen.json:
                        figures = {"seeds": seeds, "settings": overrides, "comparisons": results}
                        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")
    for name, runs in results.items():
        report(COMPARISONS[name], seeds, runs)
        if chosen.out:
            chosen.out.mkdir(parents=True, exist_ok=True)
            draw(COMPARISONS[name], runs, chosen.out / f"curves-{name}.svg")


if __name__ == "__main__":
    main()
