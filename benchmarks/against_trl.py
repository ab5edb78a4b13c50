"""Training steps on a CPU against TRL's GRPOTrainer: the same model, tasks, environment, objective and optimizer.

    python benchmarks/against_trl.py [--quick] [--json PATH] [--only hops-1M pages-1M] [--trl generate cached]
                                     [--threads 1 2] [--out FOLDER]

A step is 8 tasks x 8 attempts at temperature 1 and one optimizer step on all of them, in float32. Both sides load one
model, warm-started once, and meet the same tasks in the same order; each runs in a process of its own. Workloads:
    hops     of recipes/hops.toml: up to 8 turns of a few tokens
    pages    8 turns, observations of 200 to 400 tokens: benchmarks/pages.py
    diverse  a policy that nobody warmed up, so that attempts of a group part at their first action: 8 turns of a random
             model (6M), 4 turns of SmolLM2-135M as it is, with longer observations: benchmarks/diverse.py
TRL is set up in benchmarks/trl_trainer.py, which says what its variants are. Figures are of steps after the first:
    CPU, wall    seconds per step, median and range; x is how many times the fastest variant of TRL
    prefilled    prompt tokens computed for every token sampled, padding included
    trained      tokens in the learner's forward pass for every action token, padding included
    gradient     how far TRL's first gradient is from turnwise's where it is handed turnwise's attempts: |a - b| / |b|
With --out, a picture of reward against seconds on hops is written.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

from picture import Picture, title

from turnwise.assemble.attempts import limits
from turnwise.assemble.environments import environment_makers, task_order, tasks_of
from turnwise.assemble.model import set_threads
from turnwise.assemble.models import ModelSource
from turnwise.assemble.run import open_environments, open_tracker, run_parts
from turnwise.assemble.warm_start import starting_model
from turnwise.cli.terminal import PlainScreen
from turnwise.learn.learner import save_policy
from turnwise.learn.policy import load_model, load_tokenizer
from turnwise.recipe.parse import parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import read_step
from turnwise.runs.curve import smooth
from turnwise.runs.folder import RunFolder
from turnwise.training.run import Run
from turnwise.training.state import State
from turnwise.types import Trajectory

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "recipes" / "hops.toml"
MODELS: dict[str, dict[str, Any]] = {
    "1M": {"hidden": 128, "layers": 5},
    "6M": {"hidden": 256, "layers": 8},
    "135M": {"path": "smollm2-135m"},
}
RATES = {"1M": 7e-4, "6M": 3e-4, "135M": 1e-5}
LONG = {"max_turns": 8, "max_prompt_tokens": 3584, "max_action_tokens": 8, "max_trajectory_tokens": 3592}
DIVERSE = {
    "6M": {"max_turns": 8, "max_prompt_tokens": 248, "max_action_tokens": 8, "max_trajectory_tokens": 256},
    "135M": {"max_turns": 4, "max_prompt_tokens": 448, "max_action_tokens": 32, "max_trajectory_tokens": 480},
}
STEPS = {"hops-1M": 40, "hops-6M": 16, "pages-1M": 6, "diverse-6M": 12, "diverse-135M": 3}
"""By workload and size: steps that are measured, beside a first that is not."""
MICRO_BATCHES = {"hops": 16, "pages": 8, "diverse": 16}
"""Sequences of a forward pass of TRL: the fastest of those that were tried."""
VARIANTS = {"hops": ["generate", "cached"], "pages": ["cached"], "diverse": ["generate", "cached"]}
"""Of TRL, that are measured if nothing is said; on pages one of them takes ten minutes, and it is the faster."""
COLORS = {"turnwise": "#4c78a8", "trl": "#e07b39"}


# ---------------------------------------------------------------- what is trained


def recipe_of(
    case: str, *, path: str = "", out: str = "", threads: int = 1, quick: bool = False, groups: int = 0
) -> Recipe:
    """The recipe of a workload and size, from the warm-started model at a path or, without one, of the warm start;
    with the workload's groups a step where none are given."""
    workload, size = case.split("-")
    tree = tomllib.loads(QUICKSTART.read_text())
    tree |= {"out": out, "steps": 1000, "groups_per_step": 2 if quick else 8, "engine": {"max_num_seqs": 64}}
    tree["evaluation"] = {"every": 0, "final_tasks": 1}
    tree["checkpoints"] = {"every": 1000}
    tree["optimizer"] = {"learning_rate": RATES[size]}
    tree["model"] = {"threads": threads} | ({"path": path} if path else MODELS[size])
    tree["sft"]["optimizer"]["learning_rate"] = {"1M": 3e-3, "6M": 1.5e-3, "135M": 1e-4}[size]
    if workload == "pages":
        tree["env"] = [{"name": "pages:Pages", "dataset": "pages"}]
        if not path:  # short pages teach to copy a name, and few long ones to find it after any number of tokens
            short = {"words": [2, 8], "length": 4}
            tree["env"].append({"name": "pages:Pages", "dataset": "short", "weight": 12, "settings": short})
        tree["rollout"] = {"group_size": 8} | LONG
        tree["sft"] |= {"updates": 140, "noise": 0.12}
    if workload == "diverse":
        longer = {"settings": {"words": [40, 80], "length": 4}} if size == "135M" else {}
        tree["env"] = [{"name": "diverse:Diverse", "dataset": "diverse"} | longer]
        tree["rollout"] = {"group_size": 8} | DIVERSE[size]
        tree["groups_per_step"] = 2 if quick or size == "135M" else 8
        del tree["max_tokens_per_microbatch"]  # the default is faster where a step fills several passes
    tree["groups_per_step"] = groups or tree["groups_per_step"]
    if quick and "updates" in tree["sft"]:
        tree["sft"]["updates"] = 2
    if path or workload == "diverse":
        del tree["sft"]
    return parse_recipe(tree, case)


async def warm_model(recipe: Recipe) -> tuple[Any, Any]:
    with open_environments(recipe) as environments:
        return await starting_model(recipe, environments, Silent(), {}, asyncio.Event())


def recipe_asked_for(request: dict[str, Any], out: str = "") -> Recipe:
    """The recipe of a side."""
    asked = {name: request[name] for name in ("threads", "quick")} | {"groups": request.get("groups", 0)}
    return recipe_of(request["case"], path=request["folder"], out=out, **asked)


def warm_start(case: str, folder: Path, quick: bool) -> str:
    """The folder of the model that both sides start from."""
    recipe = recipe_of(case, quick=quick)
    set_threads(recipe)
    model, tokenizer = asyncio.run(warm_model(recipe))
    save_policy(model, tokenizer, folder / case)
    return str(folder / case)


class Silent(PlainScreen):
    """Says nothing."""

    def say(self, text: str) -> None:
        return None

    def show(self, done: int, metrics: Any) -> None:
        return None


class Laps:
    """Seconds of every step, and what it computed."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.resting = peak_memory()
        self.begin()

    def begin(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def end(self, **figures: float) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.steps.append({"wall": wall - self.wall, "cpu": cpu - self.cpu, **figures})
        self.wall, self.cpu = wall, cpu

    def report(self) -> dict[str, Any]:
        return {"steps": self.steps, "peak": peak_memory(), "resting": self.resting}


def peak_memory() -> float:
    """The most that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------- turnwise


class Stopwatch(Silent):
    """Takes a lap after every step, and stops the run after the last."""

    def __init__(self, num_steps: int, stop: asyncio.Event) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.stop = stop
        self.engine: Any = None
        self.laps = Laps()
        self.before = (0, 0)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.laps.begin()

    def show(self, done: int, metrics: Any) -> None:
        now = self.engine.prefilled_tokens, self.engine.sampled_tokens
        prefilled, sampled = (a - b for a, b in zip(now, self.before, strict=True))
        trained, reward = metrics["tokens/planned"], metrics["reward/mean"]
        self.laps.end(reward=reward, prefilled=prefilled, sampled=sampled, trained=trained)
        self.before = now
        if done == self.num_steps:
            self.stop.set()


async def train_turnwise(request: dict[str, Any]) -> dict[str, Any]:
    """A run with all that it records, without evaluations."""
    import torch

    out = f"{request['scratch']}/{request['case']}-turnwise"
    recipe = recipe_asked_for(request, out)
    set_threads(recipe)
    stop = asyncio.Event()
    watch = Stopwatch(request["steps"], stop)
    model, tokenizer = load_model(request["folder"]), load_tokenizer(request["folder"])
    folder, gradients = RunFolder.create(out, {}), []

    def keep_first(*_: Any) -> None:
        if not gradients:
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    with open_environments(recipe) as environments, closing(open_tracker(recipe, folder)) as tracker:
        async with run_parts(recipe, environments, ModelSource(model, tokenizer), folder.evaluations) as parts:
            learner: Any = parts.loop.learner
            learner.stepper.optimizers[0].register_step_pre_hook(keep_first)
            watch.engine = parts.loop.engine.model  # type: ignore[attr-defined]
            watch.laps.resting = peak_memory()
            await Run(recipe, folder, parts, State(), watch, tracker).train(stop)
    torch.save(gradients[0], request["gradient"])
    records = read_step(folder.archive / "step-000001.parquet")
    rows = [row_of(record.group.task.id, one) for record in records for one in record.group.trajectories]
    Path(request["rows"]).write_text(json.dumps(rows))
    return watch.laps.report()


def row_of(task: str, trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory whose history only grew as one sequence, with a mask of what was sampled."""
    first, last = trajectory.turns[0], trajectory.turns[-1]
    whole = [*last.prompt.tolist(), *last.action.tolist()]
    sampled = [0] * len(whole)
    for turn in trajectory.turns:
        start = len(turn.prompt)
        assert whole[: start + len(turn.action)] == [*turn.prompt.tolist(), *turn.action.tolist()]
        sampled[start : start + len(turn.action)] = [1] * len(turn.action)
    cut = len(first.prompt)
    return {
        "task": task,
        "prompt": whole[:cut],
        "completion": whole[cut:],
        "sampled": sampled[cut:],
        "reward": trajectory.total,
    }


# ---------------------------------------------------------------- TRL


def train_trl(request: dict[str, Any]) -> dict[str, Any]:
    """The same with TRL, or the first gradient of recorded attempts."""
    import torch
    from transformers import TrainerCallback
    from trl_trainer import Replay, Rollout, Tally, trainer_of

    torch.set_num_threads(request["threads"])
    recipe = recipe_asked_for(request)
    tokenizer = load_tokenizer(request["folder"])
    order = task_order(recipe, tasks_of(recipe, "train"))
    tasks = [order.draw().task for _ in range(request["steps"] * recipe.groups_per_step)]
    (make,) = environment_makers(recipe).values()
    replay = request["variant"] == "replay"
    rollout = (
        Replay(json.loads(Path(request["rows"]).read_text()))
        if replay
        else Rollout(request["variant"], make, {task.id: task for task in tasks}, tokenizer, limits(recipe))
    )
    laps = Laps()
    found: dict[str, Any] = {}

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            laps.resting = peak_memory()
            laps.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            tally, rollout.tally = rollout.tally, Tally()
            laps.end(reward=tally.rewards, prefilled=tally.prefilled, sampled=tally.sampled, trained=tally.trained)

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            if replay:
                other = torch.load(request["gradient"])
                own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                assert own.keys() == other.keys()
                apart = torch.cat([(own[name] - other[name]).flatten() for name in other]).norm()
                found["gradient"] = float(apart / torch.cat([g.flatten() for g in other.values()]).norm())

    workload = request["case"].split("-")[0]
    batch = recipe.rollout.group_size * recipe.groups_per_step
    trainer = trainer_of(
        request["folder"],
        tokenizer,
        rollout,
        [task.id for task in tasks],
        attempts=recipe.rollout.group_size,
        tasks_per_step=recipe.groups_per_step,
        steps=1 if replay else request["steps"],
        learning_rate=recipe.optimizer.learning_rate,
        clip=(recipe.loss.arguments["clip_low"], recipe.loss.arguments["clip_high"]),
        limits=limits(recipe),
        micro_batch=min(batch, request["micro_batch"] or MICRO_BATCHES[workload]),
        attention=request["attention"],
        continuous=request["variant"] == "continuous",
        callbacks=[Watch()],
        out=f"{request['scratch']}/trl",
        seed=recipe.seed,
    )
    trainer.train()
    return {**laps.report(), **found}


# ---------------------------------------------------------------- measuring


def work(request: dict[str, Any]) -> None:
    """Measure one side, in this process."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    found = asyncio.run(train_turnwise(request)) if request["side"] == "turnwise" else train_trl(request)
    print("RESULT " + json.dumps(found), flush=True)


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own measured."""
    threads = str(request["threads"])
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "0"}
    done = subprocess.run(
        [sys.executable, str(HERE / "against_trl.py"), "--worker", json.dumps(request)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{request['side']} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def measure(case: str, threads: int, chosen: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Both sides of a case."""
    steps = 1 + (chosen.steps or (2 if chosen.quick else STEPS[case]))
    request = {"case": case, "threads": threads, "steps": steps, "quick": chosen.quick, "scratch": str(scratch)}
    request |= {"folder": str(scratch / case), "gradient": str(scratch / "gradient"), "rows": str(scratch / "rows")}
    request |= {"micro_batch": chosen.micro_batch, "attention": chosen.attention, "groups": chosen.groups}
    found = []
    variants = chosen.trl or (["cached"] if chosen.quick else VARIANTS[case.split("-")[0]])
    for side, variant in [("turnwise", ""), *(("trl", variant) for variant in variants), ("trl", "replay")]:
        name = " ".join(filter(None, (side, variant)))
        print(f"{case}, {threads} threads: {name} ...", file=sys.stderr, flush=True)
        own = Path(tempfile.mkdtemp(dir=scratch))
        figures = ask({**request, "side": side, "variant": variant, "scratch": str(own)})
        found.append({"case": case, "threads": threads, "side": side, "variant": variant, **figures})
        seconds = " ".join(f"{step['cpu']:.1f}" for step in figures["steps"])
        print(f"{case}, {threads} threads: {name}: {seconds} CPU seconds a step", file=sys.stderr, flush=True)
    return found


# ---------------------------------------------------------------- reporting


def figures_of(line: dict[str, Any]) -> dict[str, float]:
    """Of the steps after the first."""
    steps = line["steps"][1:]
    total = lambda key: sum(step[key] for step in steps)
    middle = {key: statistics.median(step[key] for step in steps) for key in ("cpu", "wall")}
    return {
        **middle,
        "least": min(step["cpu"] for step in steps),
        "most": max(step["cpu"] for step in steps),
        "prefilled": total("prefilled") / total("sampled"),
        "trained": total("trained") / total("sampled"),
        "first": statistics.mean(step["reward"] for step in line["steps"][:5]),
        "last": statistics.mean(step["reward"] for step in line["steps"][-5:]),
        "peak": line["peak"],
        "resting": line["resting"],
    }


def report(lines: Sequence[dict[str, Any]]) -> None:
    for case, threads in dict.fromkeys((line["case"], line["threads"]) for line in lines):
        here = [line for line in lines if (line["case"], line["threads"]) == (case, threads)]
        measured = [(line, figures_of(line)) for line in here if line["variant"] != "replay"]
        steps = len(here[0]["steps"]) - 1
        print(f"\n{case}, {threads} thread{'s' if threads > 1 else ''}, {steps} steps")
        print(
            f"{'':18}{'CPU seconds':>20}{'wall':>8}{'steps/s':>9}{'x TRL':>8}{'wall':>7}{'peak MiB':>10}{'at rest':>9}"
            f"{'prefilled':>11}{'trained':>9}{'reward: first 5':>17}{'last 5':>8}"
        )
        peers = [f for line, f in measured if line["side"] == "trl"]
        best = {key: min((f[key] for f in peers), default=float("nan")) for key in ("cpu", "wall")}
        for line, f in measured:
            seconds = f"{f['cpu']:.2f} ({f['least']:.2f}-{f['most']:.2f})"
            print(
                f"{' '.join(filter(None, (line['side'], line['variant']))):18}"
                f"{seconds:>20}{f['wall']:>8.2f}{1 / f['cpu']:>9.2f}"
                f"{best['cpu'] / f['cpu']:>8.2f}{best['wall'] / f['wall']:>7.2f}{f['peak']:>10.0f}{f['resting']:>9.0f}"
                f"{f['prefilled']:>11.1f}{f['trained']:>9.1f}{f['first']:>17.3f}{f['last']:>8.3f}"
            )
        for line in here:
            if "gradient" in line:
                print(f"gradient of the same attempts, TRL against turnwise: {line['gradient']:.1e}")


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Write an SVG: reward against seconds, one panel per size, the fastest variant of TRL."""
    import numpy as np

    cases = list(dict.fromkeys(line["case"] for line in lines))
    picture = Picture(5.2 * len(cases), 4.2, 1, len(cases), shared=False)
    for axes, case in zip(picture.panels[0], cases, strict=True):
        own = [line for line in lines if line["case"] == case and line["variant"] != "replay"]
        for side, color in COLORS.items():
            line = min((one for one in own if one["side"] == side), key=lambda one: figures_of(one)["cpu"])
            seconds = np.cumsum([step["cpu"] for step in line["steps"]])
            rewards = np.array([step["reward"] for step in line["steps"]])
            label = {"turnwise": "turnwise", "trl": "TRL"}[side]
            axes.plot(seconds, rewards, color=color, alpha=0.3, linewidth=1)
            axes.plot(seconds, smooth(rewards), color=color, linewidth=2.6, label=f"{label}, {len(rewards)} steps")
        title(axes, f"hops, {case.split('-')[1]} parameters")
        axes.set_xlim(0, None)
    picture.save(path, "seconds of CPU time, one thread", "training attempts that succeed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: shows that it runs, no figures")
    parser.add_argument("--json", type=Path, help="where every measurement goes")
    parser.add_argument("--out", type=Path, help="draw curves-trl.svg in this folder")
    parser.add_argument("--only", nargs="+", default=None, help="workload and size, for instance hops-1M pages-6M")
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=0, help="measured steps; 0 takes each case's own")
    parser.add_argument("--trl", nargs="+", choices=("generate", "continuous", "cached"), help="its variants")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences of TRL's forward passes; 0: the fastest")
    parser.add_argument("--groups", type=int, default=0, help="of 8 attempts a step; 0: the workload's")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="of TRL's model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(json.loads(chosen.worker))
        return
    if importlib.util.find_spec("trl") is None:
        parser.error('TRL is not installed: pip install "turnwise[peers]"')
    cases = chosen.only or (["hops-1M"] if chosen.quick else list(STEPS))
    lines = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for case in cases:
            warm_start(case, scratch, chosen.quick)
            for threads in chosen.threads:
                lines += measure(case, threads, chosen, scratch)
            if chosen.json:
                chosen.json.write_text(json.dumps(lines, indent=1) + "\n")
    report(lines)
    curves = [line for line in lines if line["case"].startswith("hops") and line["threads"] == chosen.threads[0]]
    if chosen.out and curves:
        draw(curves, chosen.out / "curves-trl.svg")


if __name__ == "__main__":
    main()
