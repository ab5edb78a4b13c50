"""Many short training runs in one process: each is a line of a file, and one that is in it is not made again.

A run takes everything that decides its objective from a recipe by turnwise's own functions: credit, off-policy
correction, token weights, anchors of ratios, loss, the critic's error, the optimizer. Attempts and models are those of
walk.py, so that a step takes milliseconds; the agent loop, engines, plans and layouts are not part of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from walk import WORDS, Array, Played, Policy, Small, World, groups_of, play, ways_of

from turnwise.assemble import objective
from turnwise.assemble.learner import stepping
from turnwise.learn.critic import squared_error
from turnwise.learn.stepper import Stepper
from turnwise.recipe.parse import load_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.interval import half_width
from turnwise.types import Group

BASE = """
steps = 40
groups_per_step = 8
groups_per_update = 4
env = { name = "hops" }
rollout = { group_size = 8 }
loss = { name = "ppo_clip", anchor = "engine" }
"""
"""Of the environment nothing is used: attempts are those of walk.py."""
HELD_OUT = 2048
"""Attempts of an evaluation."""
Cell = Mapping[str, Any]
"""What names a run in the file."""


def recipe_of(*settings: str) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "walk.toml"
        path.write_text(BASE)
        recipe = load_recipe(path, settings)
    objective.check(recipe)
    return recipe


class Trainer:
    """A policy, its optimizer and, where the credit needs one, a critic.

    Example:
        Trainer(recipe_of("credit.name=rloo"), World(turns=8, goal=6), seed=0).step(groups, played)
    """

    def __init__(self, recipe: Recipe, world: World, seed: int) -> None:
        torch.manual_seed(seed)
        self.recipe = recipe
        self.needs = objective.needs(recipe)
        self.policy, self.critic = Small(WORDS, world.goal), Small(1, world.goal)
        updates = recipe.steps * recipe.updates_per_step
        self.stepper = Stepper(self.policy.named_parameters(), *stepping(recipe.optimizer, updates))
        self.critic_stepper = Stepper(self.critic.named_parameters(), *stepping(recipe.critic.optimizer, updates))
        self.estimate, self.correct = objective.estimate_of(recipe), objective.correct_of(recipe)
        self.targets, self.weigh = objective.targets_of(recipe), objective.weighting_of(recipe)
        self.ratio, self.objective = objective.ratio_of(recipe), objective.objective_of(recipe)

    def snapshot(self, version: int) -> Policy:
        with torch.no_grad():
            return Policy(version, self.policy().log_softmax(-1).double().numpy())

    def step(self, groups: Sequence[Group], played: Played) -> dict[str, float]:
        """All updates of a step, as turnwise's loop makes them."""
        lived = played.lived
        prompts, words = torch.from_numpy(played.prompts[lived]), torch.from_numpy(played.words[lived])
        sampled = played.logprobs[lived]
        scores = {}
        if "values" in self.needs:
            scores["values"] = list(self.values(prompts, words).detach().numpy())
        if "old" in self.needs:
            scores["old"] = list(self.logprobs(prompts, words)[0].detach().numpy())
        credit = self.estimate(groups, scores)
        credit, measured = self.correct(groups, credit, scores.get("old", []))
        targets = self.targets(groups, scores) if self.targets else credit
        old = list(sampled.astype(np.float32)) if self.ratio.anchor == "engine" else scores["old"]
        logged = []
        size, ends = self.recipe.groups_per_update, np.cumsum(played.turns)
        for begin in range(0, len(groups), size):
            batch = groups[begin : begin + size]
            attempts = begin * self.recipe.rollout.group_size, (begin + size) * self.recipe.rollout.group_size
            rows = slice(int(ends[attempts[0] - 1]) if begin else 0, int(ends[attempts[1] - 1]))
            weights = flat(self.weigh(batch))
            metrics = self.update(batch, prompts[rows], words[rows], old[rows], flat(credit[rows]), weights)
            if self.targets:
                metrics |= self.update_critic(
                    prompts[rows], words[rows], flat(targets[rows]), weights, flat(scores["values"][rows])
                )
            logged.append(metrics)
        return {**measured, **{name: statistics.fmean(one[name] for one in logged) for name in logged[0]}}

    def update(
        self,
        batch: Sequence[Group],
        prompts: Tensor,
        words: Tensor,
        old: Sequence[Array],
        credit: Tensor,
        weights: Tensor,
    ) -> dict[str, float]:
        now, entropies = self.logprobs(prompts, words)
        anchor = flat(self.ratio.compare(batch, old, lambda: list(now.detach().numpy())))
        logprobs = now.flatten()
        terms, measured = self.objective(logprobs, entropies.flatten(), anchor, credit, None)
        self.stepper.clear()
        (terms * weights).sum().backward()
        stepped = self.stepper.step(finite=True, idle=False)
        assert not stepped["skipped"], "an update was not finite"
        far = (logprobs - flat(old)).detach().exp()
        return {
            **{name: float((values * weights).sum()) for name, values in measured.items()},
            "gradient_norm": stepped["gradient_norm"],
            "credit": float(credit.square().mean().sqrt()),
            "largest ratio": float(far.max()),
        }

    def update_critic(
        self, prompts: Tensor, words: Tensor, targets: Tensor, weights: Tensor, old: Tensor
    ) -> dict[str, float]:
        values = self.values(prompts, words).flatten()
        terms, _ = squared_error(values, targets, old, self.recipe.critic.clip)
        self.critic_stepper.clear()
        (terms * weights).sum().backward()
        self.critic_stepper.step(finite=True, idle=False)
        left = (values.detach() - targets).var() / targets.var().clamp_min(1e-12)
        return {"critic, unexplained": float(left)}

    def logprobs(self, prompts: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """([U, 2] logprobs of the words of every turn, [U, 2] entropies of what they were drawn from)."""
        found = self.policy().log_softmax(-1)
        both = torch.stack([found[prompts, 0], found[prompts, 1 + words[:, 0]]], 1)
        return both.gather(-1, words[..., None])[..., 0], -(both.exp() * both).sum(-1)

    def values(self, prompts: Tensor, words: Tensor) -> Tensor:
        """[U, 2] the values before the words of every turn."""
        found = self.critic()[..., 0]
        return torch.stack([found[prompts, 0], found[prompts, 1 + words[:, 0]]], 1)


def flat(arrays: Sequence[Array]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32, copy=False))


def trained(world: World, seed: int, recipe: Recipe) -> dict[str, Any]:
    """A run's figures. Attempts of step k are of the weights after step k - 1 - max_lag, or of the first ones: the lag
    is exact, not a bound. All runs of a seed have the same ways, luck and chances in the same step."""
    began = time.process_time()
    trainer = Trainer(recipe, world, seed)
    curve = []
    policies: deque[Policy] = deque(maxlen=recipe.max_lag + 1)
    before = held_out(world, trainer.snapshot(0), seed)
    for step in range(recipe.steps):
        policies.append(trainer.snapshot(step))
        random = np.random.default_rng([seed, step])
        ways = ways_of(world, recipe.groups_per_step, random).repeat(recipe.rollout.group_size, 0)
        played = play(world, policies[0], ways, random)
        groups = groups_of(world, played, policies[0].version, recipe.rollout.group_size)
        metrics = trainer.step(groups, played)
        curve.append({**played.shares(world), **metrics, "lag": float(step - policies[0].version)})
    after = held_out(world, trainer.snapshot(recipe.steps), seed)
    return {"before": before, "after": after, "curve": tenths(curve), "cpu_seconds": time.process_time() - began}


def held_out(world: World, policy: Policy, seed: int) -> dict[str, float]:
    """Shares of held-out attempts, greedy and sampled."""
    found = {}
    for kind in ("greedy", "sampled"):
        random = np.random.default_rng([seed, 1 << 20])
        shares = play(world, policy, ways_of(world, HELD_OUT, random), random, greedy=kind == "greedy").shares(world)
        found |= {f"{kind}/{name}": value for name, value in shares.items()}
    return found


def tenths(curve: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The means of every measurement over the tenths of a run."""
    parts = [part.tolist() for part in np.array_split(np.arange(len(curve)), min(10, len(curve)))]
    return {name: [statistics.fmean(curve[step][name] for step in part) for part in parts] for name in curve[-1]}


# ---------------------------------------------------------------- the file


def finished(path: Path) -> list[dict[str, Any]]:
    """The runs of a file; one whose line was cut off was not finished."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def missing(cells: Sequence[Cell], runs: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """The cells without a run, in their order."""
    known = {json.dumps(run["cell"], sort_keys=True) for run in runs}
    return [cell for cell in cells if json.dumps(cell, sort_keys=True) not in known]


def make(cells: Sequence[Cell], path: Path, run: Callable[[Cell], dict[str, Any]]) -> None:
    """Make the runs that the file has not, and append each as soon as it is finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = finished(path)
    if path.exists():  # without a line that was cut off
        path.write_text("".join(json.dumps(one) + "\n" for one in runs))
    wanted = missing(cells, runs)
    for number, cell in enumerate(wanted, 1):
        made = rounded(run(cell))
        with path.open("a") as file:
            file.write(json.dumps({"cell": cell, **made}) + "\n")
        print(f"{number} of {len(wanted)}: {cell}, {made['cpu_seconds']:.1f} CPU seconds", flush=True)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


# ---------------------------------------------------------------- what the page says


def interval(values: Sequence[float], sign: str = "") -> str:
    """Mean and half the width of its 95 % t-interval."""
    return f"{statistics.fmean(values):{sign}.3f} +- {half_width(values):.3f}" if values else "missing"


def paired(runs: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """Differences by seed, of the seeds that both have."""
    return [runs[seed] - others[seed] for seed in sorted(runs.keys() & others.keys())]


def plot(axes: Any, name: str, runs: Mapping[int, Mapping[str, Any]], color: str, *, dashed: bool = False) -> None:
    """The share of right moves by tenths of training, mean over seeds."""
    curves = [run["curve"]["right"] for run in runs.values()]
    mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
    axes.plot(range(1, len(mean) + 1), mean, "--" if dashed else "-", color=color, linewidth=1.8, label=name)


def arguments(purpose: str | None, data: Path) -> argparse.Namespace:
    """The command line of a matrix, which runs in one thread."""
    parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=data, help="finished runs, as JSON lines")
    parser.add_argument("--picture", type=Path, help="draw the curves here, as SVG")
    parser.add_argument("--only-report", action="store_true", help="run nothing")
    torch.set_num_threads(1)
    return parser.parse_args()
