"""A run is the same bit for bit whichever way its weights came into memory: made here, from the cache, a checkpoint.

One slot has the engine decode one request at a time, so that every product is one with a single row: the kernels that
round by address first.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import TESTS
from support.running import SilentScreen, micro_recipe, resume, train, untimed
from training.test_run import dumps
from turnwise.assemble import run
from turnwise.cli.commands import main
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import read_step

ALONE = ["engine.max_num_seqs=1", "steps=2", "groups_per_step=2", "rollout.group_size=2", "evaluation.every=1"]
SMALL = ["evaluation.tasks=2", "evaluation.final_tasks=4", "checkpoints.every=1"]

QUICK = [(128, 2)]
"""A size at which the tensors of a file do not begin at a multiple of 16 bytes."""
ALL = [(hidden, layers) for hidden in (32, 64, 128, 192, 256) for layers in (1, 2, 3)]
SIZES = [*QUICK, *(pytest.param(*size, marks=pytest.mark.slow) for size in ALL if size not in QUICK)]


def recipe_of(folder: Path, out: str, hidden: int, layers: int) -> Recipe:
    size = [f"model.hidden={hidden}", f"model.layers={layers}"]
    return micro_recipe(folder, f"out={folder / out}", *ALONE, *SMALL, *size)


def left_by(recipe: Recipe) -> tuple[Any, ...]:
    """All numbers a run leaves but those of a clock."""
    out = Path(recipe.out)
    steps = [read_step(path) for path in sorted((out / "archive").iterdir()) if path.suffix == ".parquet"]
    trained = [
        [(*(array.tolist() for array in (*record.credit, *record.weights)),) for record in records] for records in steps
    ]
    return untimed(out / "metrics.jsonl"), dumps(recipe.out), trained


@pytest.mark.parametrize(("hidden", "layers"), SIZES)
def test_own_and_cached_warm_start_resumed_run_and_evaluation_are_one(tmp_path: Path, hidden: int, layers: int) -> None:
    own, cached, parts = (recipe_of(tmp_path, out, hidden, layers) for out in ("own", "cached", "parts"))
    train(own)
    whole = left_by(own)
    screen = SilentScreen()
    train(cached, screen)
    assert screen.said[0].startswith("warm start: from")
    assert left_by(cached) == whole

    shutil.rmtree(tmp_path / "cache")
    stop = asyncio.Event()

    class Stopper(SilentScreen):
        def show(self, done: int, metrics: object) -> None:
            if "warm" not in self.what and done == 1:
                stop.set()

    assert asyncio.run(run.start(parts, Stopper(), stop)) is None
    resume(Path(parts.out))
    assert left_by(parts) == whole

    assert main(["eval", own.out, "--out", str(tmp_path / "evaluated")]) == 0
    for kind in ("sampled", "greedy"):
        name = f"step-000002-{kind}.parquet"
        assert sampled_in(tmp_path / "evaluated" / name) == sampled_in(Path(own.out) / "evaluations" / name)


def sampled_in(path: Path) -> list[Any]:
    """All tokens and logprobs of an evaluation."""
    attempts = [attempt for record in read_step(path) for attempt in record.group.trajectories]
    turns = [turn for attempt in attempts for turn in attempt.turns]
    assert turns
    return [(turn.prompt.tolist(), turn.action.tolist(), turn.logprobs.tolist()) for turn in turns]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.running import SilentScreen, train
from training.test_bit_for_bit import recipe_of

class Killer(SilentScreen):
    def show(self, done, metrics):
        if "warm" not in self.what and done == {step}:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, text):
        if {step} == 0 and text.startswith("before:"):
            os.kill(os.getpid(), signal.SIGKILL)

train(recipe_of(Path({folder!r}), "killed", 128, 2), Killer())
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, step: int) -> None:
    whole = recipe_of(tmp_path, "whole", 128, 2)
    train(whole)
    shutil.rmtree(tmp_path / "cache")
    tests = str(TESTS)
    code = KILLED.format(tests=tests, step=step, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    resume(tmp_path / "killed")
    assert left_by(recipe_of(tmp_path, "killed", 128, 2)) == left_by(whole)


@pytest.mark.slow
def test_a_run_in_bfloat16_resumes_bit_for_bit(tmp_path: Path) -> None:
    """From the weights that are trained, which the files that others read have rounded."""
    import torch
    from transformers import AutoModelForCausalLM

    whole, parts = (in_dtype(recipe_of(tmp_path, out, 64, 1), "bfloat16") for out in ("whole", "parts"))
    train(whole)
    stop = asyncio.Event()

    class Stopper(SilentScreen):
        def show(self, done: int, metrics: object) -> None:
            if "warm" not in self.what and done == 1:
                stop.set()

    assert asyncio.run(run.start(parts, Stopper(), stop)) is None
    resume(Path(parts.out))
    assert left_by(parts) == left_by(whole)
    folder = Path(whole.out) / "checkpoints" / "step-000002"
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    assert (folder / "master_weights").is_dir()


def in_dtype(recipe: Recipe, dtype: str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


KILLED_WRITING = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.running import SilentScreen, train
from training.test_bit_for_bit import recipe_of
from turnwise.learn.export import Export

write, count = Export.write, []

def killing(export, folder):
    write(export, folder)
    count.append(folder)
    if len(count) == 2:  # the checkpoint of the first step has its tensors, and neither state nor checksums
        os.kill(os.getpid(), signal.SIGKILL)

Export.write = killing
train(recipe_of(Path({folder!r}), "killed", 128, 2), SilentScreen())
"""


@pytest.mark.slow
def test_a_run_that_is_killed_while_a_checkpoint_is_written_goes_on_from_the_one_before(tmp_path: Path) -> None:
    whole = recipe_of(tmp_path, "whole", 128, 2)
    train(whole)
    code = KILLED_WRITING.format(tests=str(TESTS), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert [path.name for path in checkpoints.glob("step-*")] == ["step-000000"]
    assert len(list(checkpoints.glob(".step-000001.*.partial"))) == 1
    resume(tmp_path / "killed")
    assert left_by(recipe_of(tmp_path, "killed", 128, 2)) == left_by(whole)
    assert list(checkpoints.glob(".*")) == []
