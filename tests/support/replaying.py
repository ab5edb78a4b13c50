"""A run with rewards that differ, recorded once, for tests that replay it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from support.running import micro_recipe, micro_toml, train
from turnwise.cli.commands import main
from turnwise.recipe.schema import Recipe
from turnwise.runs.checkpoint import checkpoint_path

EASY = ["env.0.tasks={count=64, links=[1, 1]}", "env.0.settings.link_reward=0.25", "rollout.success_threshold=0.25"]
SHORT = ["steps=3", "filter.name=dynamic_sampling", "evaluation.tasks=1", "evaluation.final_tasks=1"]
KEEP = ["checkpoints.every=1", "checkpoints.keep=9"]


@contextmanager
def places(folder: Path) -> Iterator[None]:
    """Cache and key in a folder, for what is made before a test begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_CACHE", str(folder / "cache"))
        patch.setenv("TURNWISE_STATE", str(folder / "state"))
        yield


def warm(folder: Path) -> Path:
    """A model that finds some links."""
    updates = ["sft.updates=60", "sft.optimizer.learning_rate=1e-2"]
    assert main(["sft", str(micro_toml(folder)), f"out={folder / 'warm'}", *EASY, *updates]) == 0
    return folder / "warm"


def recorded_recipe(folder: Path, *overrides: str) -> Recipe:
    start = [f"model={{path='{folder / 'warm'}', threads=1}}", "sft.updates=0"]
    return micro_recipe(folder, *EASY, *SHORT, *KEEP, *start, *overrides)


def record_run(folder: Path, *overrides: str) -> Path:
    """The folder of a run whose groups differ in their rewards, of which some were dropped."""
    with places(folder):
        warm(folder)
        recipe = recorded_recipe(folder, *overrides)
        train(recipe)
    return Path(recipe.out)


def copied(run: Path, folder: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(run, folder / "copy"))


def of_somebody_else(run: Path, folder: Path) -> Path:
    """A copy that another user made, whose recipe names code."""
    copy = copied(run, folder)
    (copy / "SHA256SUMS").unlink()
    config = json.loads((copy / "config.json").read_text())
    config["env"][0] |= {"name": "support.rescoring:Generous", "dataset": "hops"}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def weights_of(run: Path, step: int) -> dict[str, Any]:
    return load_file(checkpoint_path(run / "checkpoints", step) / "model.safetensors")


def same_weights(one: Path, other: Path, step: int) -> bool:
    """Whether two runs have the weights of a step bit for bit."""
    first, second = weights_of(one, step), weights_of(other, step)
    return first.keys() == second.keys() and all(first[name].tobytes() == second[name].tobytes() for name in first)
