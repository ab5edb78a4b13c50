"""What router replay does for a mixture of experts that is trained on what weights two versions older sampled.

    python benchmarks/router_replay.py [--seeds 5] [--first-seed 0] [--steps 12] [--lag 2] [--json FILE]

A small mixture (4 layers of 16 experts, 2 per token) learns `hops` after a warm start that both runs of a seed share,
once with `model.router_replay` and once without. A step waits until all groups that may start have been sampled, so
every turn of step 3 and later is exactly two versions old, in both runs. Engine and learner compute in float32 with the
same weights alike: what they disagree about, routes included, comes from the two updates between them. For every
trained token the archive has the engine's logprob, under the weights that sampled it, and the learner's before the
step's first update. Their difference is the gap, its exponential the ratio. Compared are

    whole runs        all turns of exactly this lag in each run
    the same turns    those of the run with replay, scored again by the checkpoints that were about to train on them,
                      with recorded and with own routes: the same weights and tokens, so that nothing else differs

Printed are medians over seeds, and the ratio of a seed's two numbers: the geometric mean with its 95 % t-interval, and
for how many seeds it is below 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.assemble import run
from turnwise.assemble.learner import policy_of
from turnwise.assemble.model import tiny_texts
from turnwise.assemble.run import open_environments, run_parts
from turnwise.assemble.warm_start import starting_model
from turnwise.cli.terminal import PlainScreen
from turnwise.learn.learner import save_policy, write_per_turn
from turnwise.learn.policy import load_model
from turnwise.learn.tiny import build_tokenizer
from turnwise.plan.cut import cut
from turnwise.recipe.parse import load_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import read_step, step_path
from turnwise.runs.checkpoint import checkpoint_path
from turnwise.runs.folder import RunFolder
from turnwise.runs.interval import half_width
from turnwise.runs.tracker import read_metrics
from turnwise.schedule.tasks import Draw
from turnwise.testing.micro import MICRO
from turnwise.training.loop import LoopParts, Stages, train_step
from turnwise.training.run import RunParts
from turnwise.types import Group, Turn, turns_of

RECIPE = (
    "model.hidden=",
    "model.layers=",
    "env.0.tasks.count=1024",
    "env.0.tasks.links=[1, 1]",
    "groups_per_step=8",
    "rollout.limits.call_seconds=3600",
    "rollout.limits.attempt_seconds=3600",
    "evaluation.every=0",
    "evaluation.final_tasks=8",
    "optimizer.learning_rate=3e-4",
    "checkpoints.every=1",
    "archive.scores=true",
)
"""In place of those of the micro recipe."""
WARM = ("sft.updates=80", "sft.batch=32", "sft.optimizer.learning_rate=3e-3")
FAR = 0.2
"""Ratios further from 1 than this are those that PPO clips."""


class Silent(PlainScreen):
    def say(self, text: str) -> None:
        return None

    def show(self, done: int, metrics: Any) -> None:
        return None


def recipe_of(folder: Path, *settings: str) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(MICRO)
    return load_recipe(folder / "recipe.toml", [*RECIPE, f"out={folder / 'run'}", *settings])


async def write_start(folder: Path, seed: int) -> Path:
    """A folder with a mixture that has seen demonstrations, and its tokenizer."""
    import transformers

    plain = load_recipe_of_tiny(folder / "texts", seed)
    with open_environments(plain) as environments:
        tokenizer = build_tokenizer(await tiny_texts(plain, environments))
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=64**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    save_policy(transformers.Qwen3MoeForCausalLM(config), tokenizer, folder / "random")
    recipe = recipe_of(folder / "warm", f"model.path={folder / 'random'}", f"seed={seed}", *WARM)
    with open_environments(recipe) as environments:
        model, _ = await starting_model(recipe, environments, Silent(), {}, asyncio.Event())
    save_policy(model, tokenizer, folder / "start")
    return folder / "start"


def load_recipe_of_tiny(folder: Path, seed: int) -> Recipe:
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(MICRO)
    return load_recipe(folder / "recipe.toml", [f"seed={seed}"])


# ---------------------------------------------------------------- runs of exactly one lag


class SampledAhead:
    """Makes a step wait until every group that its lag allows to start has been sampled: the weights that come after
    the step then sample none of them."""

    def __init__(self, loop: LoopParts) -> None:
        self.settings, self.stages = loop.settings, loop.stages
        self.sampled = 0
        self.change = asyncio.Condition()

    @property
    def waiting_stages(self) -> Stages:
        return replace(self.stages, make_group=self.make_group, run=self.run)

    async def make_group(self, draw: Draw) -> Group:
        group = await self.stages.make_group(draw)
        async with self.change:
            self.sampled += 1
            self.change.notify_all()
        return group

    async def run(self, function: Any, *arguments: Any) -> Any:
        if function is train_step:
            steps = min(arguments[-1] + 1 + self.settings.max_lag, self.settings.steps)
            async with self.change:
                await self.change.wait_for(lambda: self.sampled >= steps * self.settings.groups_per_step)
        return await self.stages.run(function, *arguments)


@asynccontextmanager
async def sampled_ahead(*arguments: Any, **how: Any) -> AsyncIterator[RunParts]:
    async with run_parts(*arguments, **how) as parts:
        stages = SampledAhead(parts.loop).waiting_stages
        yield replace(parts, loop=replace(parts.loop, stages=stages))


async def train_to_end(recipe: Recipe) -> None:
    stop = asyncio.Event()
    async with run.training(recipe, Silent(), stop, open_parts=sampled_ahead, origin="sampled ahead") as training:
        await training.to_end(stop)


def trained(start: Path, folder: Path, *settings: str) -> RunFolder:
    """A run from a folder with weights."""
    asyncio.run(train_to_end(recipe_of(folder, f"model.path={start}", "sft.updates=0", *settings)))
    return RunFolder.open(folder / "run")


# ---------------------------------------------------------------- what is measured


def measured(sampled: NDArray[Any], learners: NDArray[Any]) -> dict[str, float]:
    """How far the learner is from the engine on the same tokens."""
    difference = (learners - sampled).astype(np.float64)
    ratio = np.exp(difference)
    return {
        "gap, mean": float(np.abs(difference).mean()),
        "gap, k3": float((np.expm1(difference) - difference).mean()),
        "distance of a ratio from 1, mean": float(np.abs(ratio - 1).mean()),
        f"ratios more than {FAR:g} from 1, share": float((np.abs(ratio - 1) > FAR).mean()),
    }


def turns_of_step(folder: RunFolder, step: int, lag: int) -> tuple[list[Turn], list[NDArray[np.float32]]]:
    """(turns that a step has trained on, the learner's logprobs of them). All must be of this lag."""
    records = [record for record in read_step(step_path(folder.archive, step)) if record.kept]
    turns = list(turns_of([record.group for record in records]))
    assert all((turn.versions == step - 1 - lag).all() for turn in turns), f"step {step} has turns of another lag"
    return turns, [logprobs for record in records for logprobs in record.learner_logprobs]


def of_run(folder: RunFolder, steps: int, lag: int) -> dict[str, float]:
    """Over all tokens of this lag that a run was trained on, from its archive; and its success."""
    found = [turns_of_step(folder, step, lag) for step in range(lag + 1, steps + 1)]
    sampled = np.concatenate([turn.logprobs for turns, _ in found for turn in turns])
    learners = np.concatenate([logprobs for _, of_step in found for logprobs in of_step])
    success = [line["success"] for line in read_metrics(folder.metrics) if "success" in line]
    return {**measured(sampled, learners), "success of the last 5 steps": statistics.mean(success[-5:])}


@torch.no_grad()
def scored(recipe: Recipe, weights: Path, turns: list[Turn], *, replay: bool) -> NDArray[Any]:
    """The logprobs of all action tokens under some weights."""
    policy = policy_of(recipe, load_model(weights), replay=replay)
    found: list[NDArray[Any]] = [np.zeros(0, np.float32)] * len(turns)
    for plan in cut(turns, recipe.max_tokens_per_microbatch):
        write_per_turn(plan, [(picked, logprobs.numpy()) for picked, logprobs, _ in policy.passes(plan)], found)
    return np.concatenate(found)


def same_turns(folder: RunFolder, recipe: Recipe, steps: int, lag: int, *, replay: bool) -> dict[str, float]:
    """The turns of every step under the weights before it, with recorded or with own routes."""
    sampled, learners = [], []
    for step in range(lag + 1, steps + 1):
        turns, _ = turns_of_step(folder, step, lag)
        sampled += [turn.logprobs for turn in turns]
        learners.append(scored(recipe, checkpoint_path(folder.checkpoints, step - 1), turns, replay=replay))
    return measured(np.concatenate(sampled), np.concatenate(learners))


Compared = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Of a seed: numbers by what is compared, with replay or without, and name."""
WITH, WITHOUT = "with replay", "without"


def compare(folder: Path, seed: int, steps: int, lag: int, *settings: str) -> Compared:
    start = asyncio.run(write_start(folder, seed))
    how = (f"seed={seed}", f"steps={steps}", f"max_lag={lag}", "checkpoints.keep=1000", *settings)
    with_replay = trained(start, folder / "replay", *how, "model.router_replay=true")
    without = trained(start, folder / "plain", *how)
    again = partial(same_turns, with_replay, recipe_of(folder / "scoring", f"model.path={start}", *how), steps, lag)
    return {
        "whole runs": {WITH: of_run(with_replay, steps, lag), WITHOUT: of_run(without, steps, lag)},
        "the same turns": {WITH: again(replay=True), WITHOUT: again(replay=False)},
    }


def summary(found: list[Compared]) -> str:
    """Medians over seeds, and the geometric mean of their ratios with its interval."""
    lines = [f"{'':44} {WITH:>12} {WITHOUT:>12}  with / without"]
    for part in found[0]:
        lines.append(part)
        for name in found[0][part][WITH]:
            pairs = [(one[part][WITH][name], one[part][WITHOUT][name]) for one in found]
            middle = [statistics.median(values) for values in zip(*pairs, strict=True)]
            lines.append(f"  {name:42} {middle[0]:12.4g} {middle[1]:12.4g}  {in_interval(pairs)}")
    return "\n".join(lines)


def in_interval(pairs: list[tuple[float, float]]) -> str:
    if any(value <= 0 for pair in pairs for value in pair):
        return "-"
    logs = [math.log(one / other) for one, other in pairs]
    mean, half = statistics.mean(logs), half_width(logs)
    low, middle, high = (math.exp(value) for value in (mean - half, mean, mean + half))
    below = sum(value < 0 for value in logs)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}], below 1 for {below} of {len(logs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument("--json", type=Path, help="what was measured; seeds that are in it are not measured again")
    parser.add_argument("settings", nargs="*", help="of the recipe, such as optimizer.learning_rate=1e-3")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Compared] = json.loads(chosen.json.read_text()) if chosen.json and chosen.json.exists() else []
    for number in range(len(found), chosen.seeds):
        with tempfile.TemporaryDirectory() as folder:
            seed = chosen.first_seed + number
            found.append(compare(Path(folder), seed, chosen.steps, chosen.lag, *chosen.settings))
        print(f"\n{len(found)} seeds, {chosen.steps} steps at a lag of {chosen.lag}\n{summary(found)}", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
