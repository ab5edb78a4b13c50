"""Asynchronous runs that are killed at random moments and resumed: nothing lost, nothing trained twice."""

import os
import signal
import subprocess
import sys
import threading
import time
from random import Random

import pytest

from support.paths import TESTS
from support.running import micro_recipe, resume, train, untimed
from turnwise.assemble.environments import task_order, tasks_of
from turnwise.runs.archive import archived_steps, read_step
from turnwise.runs.tracker import JsonLines
from turnwise.types import turns_of

COMMON = (
    "env.0.name=support.slow:Slow",
    "env.0.dataset=hops",
    "env.0.settings.pace=0.01",
    "env.0.tasks.count=1024",  # more than are drawn, so that a task tells which draw it was
    "max_lag=2",
    "sft.updates=0",
    "evaluation.final_tasks=4",
    "evaluation.every=0",
    "rollout.limits.call_seconds=0.5",
    "rollout.failures.retries=0",
)
WORK = """
import sys; sys.path.insert(0, {tests!r})
from pathlib import Path
from training.test_async_run import go
go(Path({out!r}), {steps})
"""


def go(out, steps):
    """Start the run, or go on with it, and never come to the end of its last step. `ready` tells the one who waits to
    kill that imports are done."""
    log = JsonLines.log

    def log_or_wait(self, step, metrics):
        if step == steps:
            threading.Event().wait()
        log(self, step, metrics)

    JsonLines.log = log_or_wait
    (out.parent / "ready").touch()
    if out.exists():
        resume(out)
    else:
        train(slow_recipe(out, steps))


def slow_recipe(out, steps):
    return micro_recipe(out.parent, *COMMON, f"steps={steps}", f"out={out}")


def killed(out, steps, seconds):
    """Run in a process of its own and kill that after so many seconds of work."""
    code = WORK.format(tests=str(TESTS), out=str(out), steps=steps)
    ready = out.parent / "ready"
    ready.unlink(missing_ok=True)
    with open(out.parent / "stderr", "w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=stderr
        )
        while process.poll() is None and not ready.exists():
            time.sleep(0.01)
        time.sleep(seconds)
        alive = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        stderr.seek(0)
        assert alive, f"ended by itself:\n{stderr.read()}"


@pytest.mark.parametrize(
    ("kills", "steps"), [(2, 8), pytest.param(30, 60, marks=pytest.mark.slow)], ids=["2 kills", "30 kills"]
)
def test_kill_9_at_random_moments_loses_nothing_and_trains_nothing_twice(tmp_path, kills, steps):
    out, random = tmp_path / "run", Random(kills)
    recipe = slow_recipe(out, steps)
    for _ in range(kills):
        killed(out, steps, random.uniform(0.2, 6.0))
    summary = resume(out)
    assert summary["updates"] == steps
    assert [line["step"] for line in untimed(out / "metrics.jsonl")] == list(range(steps + 1))
    assert archived_steps(out / "archive") == list(range(1, steps + 1))
    records = {step: read_step(out / "archive" / f"step-{step:06d}.parquet") for step in range(1, steps + 1)}
    used = [record.group.task.id for step in records for record in records[step]]
    order = task_order(recipe, tasks_of(recipe, "train"))
    assert sorted(used) == sorted(order.draw().task.id for _ in used)  # none lost, none used twice
    assert [sum(record.kept for record in records[step]) for step in records] == [recipe.groups_per_step] * steps
    for step in records:
        turns = list(turns_of([record.group for record in records[step] if record.kept]))
        assert all(0 <= step - 1 - turn.versions.min(initial=step - 1) <= 2 for turn in turns)
        assert all(turn.versions.max(initial=0) <= step - 1 for turn in turns)
