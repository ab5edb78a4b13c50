"""The quick start with turnwise and with TRL: held-out success against seconds, from one warm start, on a CPU.

    python benchmarks/quickstart_trl.py [--quick] [--seeds 0 1 2] [--sides "turnwise" "trl shared"] [--every 2]
                                        [--parts 2] [--data PATH] [--picture PATH] [--only-report]

recipes/quickstart.toml, one thread, float32. The warm start is made once for a seed, by turnwise, and both sides load
its folder: they begin with the same weights. Both meet the same tasks in the same order, 16 tasks x 8 attempts a step,
with the same sampling, advantages, loss, optimizer and schedule. TRL is set up in benchmarks/trl_trainer.py and
benchmarks/trl_turns.py, which says what its variants are. Each side trains in a process of its own and keeps its
weights every few steps; then turnwise's evaluator makes the same held-out attempts on all of them.

CPU is the time of the whole process, wall what passed meanwhile, both of training alone: imports, loading, the warm
start, the copies of weights and the evaluations are on no clock. What turnwise records of every step is on its clock.
Printed are seconds and attempts until the first evaluation of at least 0.90, of 128 held-out tasks, and how many times
turnwise's seconds TRL takes. gradient: how far TRL's first gradient is from turnwise's where it is handed turnwise's
attempts, |a - b| / |b|. Every finished run is a line of the data, and one that is there is not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from against_trl import Laps, Silent, Stopwatch, warm_model
from matrix import Cell, finished, make
from picture import Picture, title

from turnwise.assemble.attempts import evaluation_attempts, limits
from turnwise.assemble.environments import environment_makers, task_order, tasks_of
from turnwise.assemble.evaluation import open_model
from turnwise.assemble.model import set_threads
from turnwise.assemble.models import ModelSource
from turnwise.assemble.run import open_environments, open_tracker, run_parts
from turnwise.evaluation.evaluator import Evaluator
from turnwise.evaluation.target import EvaluationTarget
from turnwise.learn.learner import save_policy
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.recipe.parse import parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import read_step
from turnwise.runs.folder import RunFolder
from turnwise.training.run import Run
from turnwise.training.state import State
from turnwise.types import Trajectory

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "quickstart.toml"
DATA = HERE / "data" / "quickstart-trl.jsonl"
GOAL = 0.90
SIDES = ("turnwise", "trl shared", "trl lean", "trl generate")
PARTS = 2
"""Micro-batches of TRL's step: the fastest of 1, 2, 4, 8 and 16."""
COLORS = {"turnwise": "#4c78a8", "trl shared": "#e07b39", "trl lean": "#d9b310", "trl generate": "#7b3294"}
LABELS = {"turnwise": "turnwise", "trl shared": "TRL", "trl lean": "TRL, lean", "trl generate": "TRL, its own sampling"}
KINDS = ("greedy", "sampled")


# ---------------------------------------------------------------- what is trained


def recipe_of(seed: int, *, path: str = "", out: str = "", quick: bool = False) -> Recipe:
    """The quick start, from the warm-started model at a path or, without one, of the warm start."""
    tree = tomllib.loads(RECIPE.read_text())
    tree |= {"seed": seed, "out": out}
    tree["model"] = {"threads": 1} | ({"path": path} if path else tree["model"])
    if quick:
        tree |= {"steps": 3, "groups_per_step": 2}
        tree["evaluation"] |= {"final_tasks": 8}
        tree["sft"]["updates"] = 2
    if path:
        del tree["sft"]
    return parse_recipe(tree, "quickstart")


def warm_start(seed: int, folder: Path, quick: bool) -> str:
    """The folder of the model that both sides start from."""
    recipe = recipe_of(seed, quick=quick)
    set_threads(recipe)
    model, tokenizer = asyncio.run(warm_model(recipe))
    save_policy(model, tokenizer, folder)
    return str(folder)


class Kept:
    """Weights after every few steps, by step."""

    def __init__(self, every: int, steps: int) -> None:
        self.every = every
        self.steps = steps
        self.weights: dict[int, dict[str, Any]] = {}

    def see(self, step: int, model: Any) -> None:
        if step % self.every == 0 or step == self.steps:
            self.weights[step] = {name: value.clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------- turnwise


class Watch(Stopwatch):
    """Keeps weights besides, while the clock stands still."""

    def __init__(self, steps: int, kept: Kept, model: Any) -> None:
        super().__init__(steps, asyncio.Event())
        self.kept = kept
        self.model = model

    def show(self, done: int, metrics: Any) -> None:
        super().show(done, metrics)
        self.kept.see(done, self.model)
        self.laps.begin()


async def train_turnwise(request: Mapping[str, Any], kept: Kept) -> dict[str, Any]:
    """A run with all that it records, without evaluations."""
    import torch

    out = f"{request['scratch']}/turnwise"
    recipe = recipe_of(request["seed"], path=request["folder"], out=out, quick=request["quick"])
    set_threads(recipe)
    model, tokenizer = load_model(request["folder"]), load_tokenizer(request["folder"])
    kept.see(0, model)
    watch = Watch(recipe.steps, kept, model)
    folder, gradients = RunFolder.create(out, {}), []

    def keep_first(*_: Any) -> None:
        if not gradients:
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    with open_environments(recipe) as environments, closing(open_tracker(recipe, folder)) as tracker:
        async with run_parts(recipe, environments, ModelSource(model, tokenizer), folder.evaluations) as parts:
            learner: Any = parts.loop.learner
            learner.stepper.optimizers[0].register_step_pre_hook(keep_first)
            watch.engine = parts.loop.engine.model  # type: ignore[attr-defined]
            unjudged = replace(parts, evaluator=None)  # evaluations are made afterwards
            await Run(recipe, folder, unjudged, State(), watch, tracker).train(watch.stop)
    torch.save(gradients[0], request["gradient"])
    records = read_step(folder.archive / "step-000001.parquet")
    rows = [row_of(record.group.task.id, one) for record in records for one in record.group.trajectories]
    Path(request["rows"]).write_text(json.dumps(rows))
    return watch.laps.report()


def row_of(task: str, trajectory: Trajectory) -> dict[str, Any]:
    turns = [(turn.prompt.tolist(), turn.action.tolist()) for turn in trajectory.turns]
    return {"task": task, "turns": turns, "reward": trajectory.total}


# ---------------------------------------------------------------- TRL


def train_trl(request: Mapping[str, Any], kept: Kept) -> dict[str, Any]:
    """The same with TRL, or the first gradient of recorded attempts."""
    import torch
    from transformers import TrainerCallback
    from trl_trainer import Tally, trainer_of
    from trl_turns import Recorded, TurnRollout, turn_trainer

    recipe = recipe_of(request["seed"], path=request["folder"], quick=request["quick"])
    set_threads(recipe)
    tokenizer = load_tokenizer(request["folder"])
    order = task_order(recipe, tasks_of(recipe, "train"))
    tasks = [order.draw().task for _ in range(recipe.steps * recipe.groups_per_step)]
    (make_one,) = environment_makers(recipe).values()
    replay = request["variant"] == "replay"
    rollout: TurnRollout = (
        Recorded(json.loads(Path(request["rows"]).read_text()))
        if replay
        else TurnRollout(request["variant"], make_one, {task.id: task for task in tasks}, tokenizer, limits(recipe))
    )
    laps = Laps()
    found: dict[str, Any] = {}

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            kept.see(0, model)
            laps.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            tally, rollout.tally = rollout.tally, Tally()
            tokens = {"prefilled": tally.prefilled, "sampled": tally.sampled, "trained": tally.trained}
            laps.end(reward=tally.rewards, sampling=tally.seconds, **tokens)
            kept.see(state.global_step, model)
            laps.begin()

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            if replay:
                other = torch.load(request["gradient"])
                own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                assert own.keys() == other.keys()
                apart = torch.cat([(own[name] - other[name]).flatten() for name in other]).norm()
                found["gradient"] = float(apart / torch.cat([g.flatten() for g in other.values()]).norm())

    batch = recipe.rollout.group_size * recipe.groups_per_step
    trainer = trainer_of(
        request["folder"],
        tokenizer,
        rollout,
        [task.id for task in tasks],
        attempts=recipe.rollout.group_size,
        tasks_per_step=recipe.groups_per_step,
        steps=1 if replay else recipe.steps,
        learning_rate=recipe.optimizer.learning_rate,
        clip=(recipe.loss.arguments["clip_low"], recipe.loss.arguments["clip_high"]),
        limits=limits(recipe),
        micro_batch=batch // request["parts"],
        attention=request["attention"],
        continuous=False,
        callbacks=[Clock()],
        out=f"{request['scratch']}/trl",
        seed=recipe.seed,
        schedule=recipe.optimizer.schedule,
        trainer=turn_trainer(),
    )
    trainer.train()
    return {**laps.report(), **found}


# ---------------------------------------------------------------- held-out attempts


async def judge(request: Mapping[str, Any]) -> dict[str, Any]:
    """Success of all weights that were kept, at the same held-out tasks, by turnwise's evaluator."""
    import torch

    recipe = recipe_of(request["seed"], path=request["folder"], quick=request["quick"])
    target = EvaluationTarget("weights that were kept", recipe, Path(request["folder"]), 0, Path(request["scratch"]))
    (tasks,) = tasks_of(recipe, "heldout", recipe.evaluation.final_tasks).values()
    kept = torch.load(request["weights"])
    found = []
    async with open_model(target, Silent()) as model:
        evaluator = Evaluator(
            model.engine,
            partial(evaluation_attempts, recipe, model.environments, model.engine, model.renderer),
            Path(request["scratch"]) / "evaluations",
            success_at=recipe.rollout.success_threshold,
            decode=model.renderer.decode,
        )
        engine: Any = model.engine
        for step, weights in kept.items():
            engine.model.model.load_state_dict(weights)  # this engine samples from a module that others change
            made = await evaluator.evaluate_together(step, tasks, (False, True), weights={})
            found.append({"step": step, **{one.kind: one.metrics[f"eval/{one.kind}/success"] for one in made}})
    return {"evaluations": found}


# ---------------------------------------------------------------- measuring


def work(request: Mapping[str, Any]) -> None:
    """Train or judge one side, in this process."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch

    if request["side"] == "judge":
        found = asyncio.run(judge(request))
    else:
        kept = Kept(request["every"], recipe_of(request["seed"], quick=request["quick"]).steps)
        own = request["side"] == "turnwise"
        found = asyncio.run(train_turnwise(request, kept)) if own else train_trl(request, kept)
        torch.save(kept.weights, request["weights"])
    print("RESULT " + json.dumps(found), flush=True)


def ask(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a process of its own found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{request['side']} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def run_cell(cell: Cell, *, chosen: argparse.Namespace, models: Path) -> dict[str, Any]:
    """One side of one seed, trained and judged."""
    folder = models / f"seed-{cell['seed']}"
    began = time.process_time()
    if not folder.exists():
        warm_start(cell["seed"], folder, chosen.quick)
    warm = time.process_time() - began
    side, _, variant = cell["side"].partition(" ")
    with tempfile.TemporaryDirectory(dir=models) as scratch:
        request = {"seed": cell["seed"], "side": side, "variant": variant, "folder": str(folder), "scratch": scratch}
        request |= {"quick": chosen.quick, "every": chosen.every, "parts": chosen.parts}
        request |= {"attention": chosen.attention}
        request |= {name: f"{scratch}/{name}" for name in ("gradient", "rows", "weights")}
        made = ask(request)
        judged = ask({**request, "side": "judge"})
        if side == "turnwise" and importlib.util.find_spec("trl") is not None:
            replayed = {"side": "trl", "variant": "replay", "weights": f"{scratch}/none"}
            made["gradient"] = ask({**request, **replayed})["gradient"]
    recipe = recipe_of(cell["seed"], quick=chosen.quick)
    made["attempts"] = recipe.groups_per_step * recipe.rollout.group_size  # of a step
    return {**made, **judged, "cpu_seconds": sum(step["cpu"] for step in made["steps"]), "warm_start": warm}


# ---------------------------------------------------------------- reporting


def curve(run: Mapping[str, Any]) -> list[dict[str, float]]:
    """The evaluations of a run, with the seconds and attempts that training had taken by then."""
    spent = {clock: [0.0, *accumulate(step[clock] for step in run["steps"])] for clock in ("cpu", "wall")}
    return [{**one, **{clock: spent[clock][one["step"]] for clock in spent}} for one in run["evaluations"]]


def goal(run: Mapping[str, Any], kind: str) -> dict[str, float] | None:
    """The first evaluation of at least the goal."""
    return next((one for one in curve(run) if one[kind] >= GOAL), None)


def report(runs: Sequence[Mapping[str, Any]]) -> None:
    of = {(run["cell"]["side"], run["cell"]["seed"]): run for run in runs}
    sides = [side for side in SIDES if any(side == one for one, _ in of)]
    seeds = sorted({seed for _, seed in of})
    for run in of.values():
        if "gradient" in run:
            seed = run["cell"]["seed"]
            print(f"seed {seed}: gradient of the same attempts, TRL against turnwise: {run['gradient']:.1e}")
    print(f"\n{'':42}{'tokens per sampled':>21}{'held-out success':>26}{'CPU seconds, attempts to 0.90':>31}")
    print(
        f"{'':20}{'CPU s/step':>10}{'all':>6}{'wall':>6}{'prefilled':>12}{'trained':>9}{'greedy':>14}{'sampled':>12}"
        f"{'greedy':>14}{'sampled':>17}"
    )
    for seed in seeds:
        for side in sides:
            if (side, seed) in of:
                print(f"seed {seed}{side:>14}{line_of(of[side, seed])}")
    print()
    for (side, seed), run in of.items():
        print(f"seed {seed}{side:>14}: {parts_of(run['steps'])}")
    own = {seed: of["turnwise", seed] for seed in seeds if ("turnwise", seed) in of}
    for side in sides[1:]:
        print(f"\n{side}: times turnwise's CPU seconds, median and range over seeds")
        for name, seconds in MEASURES.items():
            pairs = [(seconds(of[side, seed]), seconds(run)) for seed, run in own.items() if (side, seed) in of]
            ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
            missed = len(pairs) - len(ratios)
            print(f"  {name:18}{spread(ratios)}" + (f", {missed} without" if missed else ""))


def line_of(run: Mapping[str, Any]) -> str:
    steps, judged = run["steps"], run["evaluations"]
    total = {key: sum(step[key] for step in steps) for key in ("cpu", "wall", "prefilled", "sampled", "trained")}
    line = f"{statistics.median(s['cpu'] for s in steps):10.2f}{total['cpu']:6.0f}{total['wall']:6.0f}"
    line += f"{total['prefilled'] / total['sampled']:12.1f}{total['trained'] / total['sampled']:9.1f}  "
    line += "".join(f"{judged[0][kind]:.3f}-{judged[-1][kind]:.3f}".rjust(12) for kind in KINDS) + "  "
    for kind, width in zip(KINDS, (12, 17), strict=True):
        met = goal(run, kind)
        line += (f"{met['cpu']:.1f}, {run['attempts'] * met['step']:.0f}" if met else "never").rjust(width)
    return line


def parts_of(steps: Sequence[Mapping[str, float]]) -> str:
    """What a step computes, and, where that was measured, how long its attempts take."""
    tokens = statistics.mean(step["trained"] for step in steps)
    said = f"{tokens:.0f} tokens in the update of a step"
    if "sampling" not in steps[0]:
        return said
    sampling, whole = (statistics.median(step[part] for step in steps) for part in ("sampling", "cpu"))
    return f"{said}; its attempts take {sampling:.2f} of {whole:.2f} CPU seconds"


def seconds_to(kind: str, run: Mapping[str, Any]) -> float:
    met = goal(run, kind)
    return met["cpu"] if met else 0.0


MEASURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "a step": lambda run: statistics.median(step["cpu"] for step in run["steps"]),
    "all steps": lambda run: sum(step["cpu"] for step in run["steps"]),
    "to 0.90 greedy": partial(seconds_to, "greedy"),
    "to 0.90 sampled": partial(seconds_to, "sampled"),
}


def spread(values: Sequence[float]) -> str:
    if not values:
        return "none"
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}), {len(values)} seeds"


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Held-out success against seconds of CPU time: greedy and sampled, a curve for each seed."""
    picture = Picture(10, 4.2, 1, 2)
    for axes, kind in zip(picture.panels[0], KINDS, strict=True):
        for side in SIDES:
            mine = [run for run in runs if run["cell"]["side"] == side]
            for place, run in enumerate(mine):
                found = curve(run)
                label = LABELS[side] if place == 0 else None
                across, up = [one["cpu"] for one in found], [one[kind] for one in found]
                axes.plot(across, up, color=COLORS[side], linewidth=1.6, alpha=0.85, label=label)
        axes.axhline(GOAL, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xlim(0, None)
        title(axes, f"{kind} attempts")
    picture.save(path, "seconds of CPU time of training, one thread", "held-out attempts that succeed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: shows that it runs, no figures")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations")
    parser.add_argument("--parts", type=int, default=PARTS, help="micro-batches of TRL's step")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="of TRL's model")
    parser.add_argument("--data", type=Path, default=DATA, help="finished runs, as JSON lines")
    parser.add_argument("--json", type=Path, help="where every measurement goes, beside the data")
    parser.add_argument("--picture", type=Path, help="draw the curves here, as SVG")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(json.loads(chosen.worker))
        return
    if importlib.util.find_spec("trl") is None and not chosen.only_report:
        parser.error('TRL is not installed: pip install "turnwise[peers]"')
    with tempfile.TemporaryDirectory() as name:
        if chosen.quick:  # which leaves no figures behind
            chosen.data, chosen.seeds, chosen.every = Path(name) / "quick.jsonl", chosen.seeds[:1], 1
        if not chosen.only_report:
            cells: list[Cell] = [{"seed": seed, "side": side} for seed in chosen.seeds for side in chosen.sides]
            make(cells, chosen.data, partial(run_cell, chosen=chosen, models=Path(name)))
        runs = finished(chosen.data)
    report(runs)
    if chosen.json:
        chosen.json.write_text(json.dumps(runs, indent=1) + "\n")
    if chosen.picture:
        draw(runs, chosen.picture)


if __name__ == "__main__":
    main()
