"""What router replay does for a mixture of experts that is trained on what older weights sampled.

    python benchmarks/router_replay.py [--seeds 5] [--steps 24] [--lag 2] [--json FILE]

A tiny mixture (2 layers of 8 experts, 2 per token) learns `hops` with `max_lag = 2`, after a warm start that both runs
of a seed share, once with `model.router_replay` and once without. For every trained token the archive has the engine's
logprob, under the weights that sampled it, and the learner's before the step's first update. Their difference is the
gap, its exponential the ratio. After each run its last checkpoint scores the last step's turns again, with recorded and
with its own routes: the same weights and the same tokens, so that nothing else differs. Medians over seeds, and in
brackets the smallest and the largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnwise.assemble import run
from turnwise.assemble.learner import policy_of
from turnwise.assemble.model import tiny_texts
from turnwise.assemble.run import open_environments
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
from turnwise.runs.tracker import read_metrics
from turnwise.testing.micro import MICRO
from turnwise.types import Turn, turns_of

RECIPE = (
    "model.hidden=",
    "model.layers=",
    "env.0.tasks.count=1024",
    "env.0.tasks.links=[1, 3]",
    "groups_per_step=8",
    "evaluation.every=0",
    "evaluation.final_tasks=64",
    "optimizer.learning_rate=1e-3",
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
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
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


def trained(start: Path, folder: Path, *settings: str) -> RunFolder:
    """A run from a folder with weights."""
    recipe = recipe_of(folder, f"model.path={start}", "sft.updates=0", *settings)
    asyncio.run(run.start(recipe, Silent(), asyncio.Event()))
    return RunFolder.open(folder / "run")


# ---------------------------------------------------------------- what is measured


def measured(sampled: NDArray[Any], learners: NDArray[Any]) -> dict[str, float]:
    """How far the learner is from the engine on the same tokens."""
    difference = (learners - sampled).astype(np.float64)
    ratio = np.exp(difference)
    return {
        "gap, mean": float(np.abs(difference).mean()),
        "gap, k3": float((np.expm1(difference) - difference).mean()),
        "|ratio - 1|, mean": float(np.abs(ratio - 1).mean()),
        "|mean ratio - 1|": float(abs(ratio.mean() - 1)),
        f"ratios more than {FAR:g} from 1, share": float((np.abs(ratio - 1) > FAR).mean()),
    }


def of_run(folder: RunFolder, steps: int) -> dict[str, float]:
    """Over all trained tokens of a run, from its archive; and its lag and success."""
    sampled, learners = [], []
    for step in range(1, steps + 1):
        for record in read_step(step_path(folder.archive, step)):
            sampled += [turn.logprobs for turn in turns_of([record.group])] if record.kept else []
            learners += record.learner_logprobs
    lines = read_metrics(folder.metrics)
    lag = [line["lag/mean"] for line in lines if "lag/mean" in line]
    disagreed = [line["routes/disagreed"] for line in lines if "routes/disagreed" in line]
    success = [line["success"] for line in lines if "success" in line][-5:]
    return {
        **measured(np.concatenate(sampled), np.concatenate(learners)),
        "lag, mean": statistics.mean(lag),
        "success of the last 5 steps": statistics.mean(success),
        **({"routes that turns disagreed on, share": statistics.mean(disagreed)} if disagreed else {}),
    }


@torch.no_grad()
def scored(recipe: Recipe, weights: Path, turns: list[Turn], *, replay: bool) -> NDArray[Any]:
    """The logprobs of all action tokens under some weights."""
    policy = policy_of(recipe, load_model(weights), replay=replay)
    found: list[NDArray[Any]] = [np.zeros(0, np.float32)] * len(turns)
    for plan in cut(turns, recipe.max_tokens_per_microbatch):
        write_per_turn(plan, [(picked, logprobs.numpy()) for picked, logprobs, _ in policy.passes(plan)], found)
    return np.concatenate(found)


def same_turns(folder: RunFolder, recipe: Recipe, steps: int) -> dict[str, dict[str, float]]:
    """The turns of the last step under the weights before it, with recorded and with own routes."""
    records = read_step(step_path(folder.archive, steps))
    turns = list(turns_of([record.group for record in records if record.kept]))
    sampled = np.concatenate([turn.logprobs for turn in turns])
    weights = checkpoint_path(folder.checkpoints, steps - 1)
    return {
        name: measured(sampled, scored(recipe, weights, turns, replay=replay))
        for name, replay in (("with replay", True), ("without", False))
    }


def compare(folder: Path, seed: int, steps: int, lag: int) -> dict[str, dict[str, dict[str, float]]]:
    start = asyncio.run(write_start(folder, seed))
    how = (f"seed={seed}", f"steps={steps}", f"max_lag={lag}")
    with_replay = trained(start, folder / "replay", *how, "model.router_replay=true")
    without = trained(start, folder / "plain", *how)
    recipe = recipe_of(folder / "scoring", f"model.path={start}", *how)
    return {
        "whole runs": {"with replay": of_run(with_replay, steps), "without": of_run(without, steps)},
        "the same turns and weights": same_turns(with_replay, recipe, steps),
    }


def summary(found: list[dict[str, dict[str, dict[str, float]]]]) -> str:
    """Medians over seeds, and in brackets the smallest and the largest."""
    lines = []
    for part in found[0]:
        lines.append(part)
        for name in found[0][part]["with replay"]:
            cells = []
            for arm in ("with replay", "without"):
                values = [one[part][arm][name] for one in found if name in one[part][arm]]
                low, middle, high = min(values, default=0), statistics.median(values or [0]), max(values, default=0)
                cells.append(f"{middle:.4g} [{low:.3g}, {high:.3g}]" if values else "-")
            lines.append(f"  {name:42} {cells[0]:34} {cells[1]}")
    return "\n".join([f"{'':44} {'with replay':34} without", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lag", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(compare(Path(folder), seed, arguments.steps, arguments.lag))
        print(
            f"\nafter {seed + 1} seeds, {arguments.steps} steps at max_lag = {arguments.lag}\n{summary(found)}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
