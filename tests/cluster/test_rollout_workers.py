"""Runs whose attempts are made by other processes: the same tokens, and nothing lost with a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.running import SilentScreen, in_run_loop, micro_recipe, micro_toml, resume, train, untimed
from training.test_bit_for_bit import left_by
from turnwise.assemble import run
from turnwise.assemble.environments import training_order
from turnwise.assemble.rollout_workers import check_workers
from turnwise.assemble.run import open_environments
from turnwise.envs.base import Reply
from turnwise.envs.live import lent
from turnwise.recipe.parse import parse_recipe
from turnwise.rollout.batching.joined import joined_reports
from turnwise.runs.archive import read_step

SMALL = ["steps=3", "evaluation.tasks=2", "evaluation.final_tasks=4", "sft.updates=2"]


def sampled_by(out: Path) -> list[Any]:
    """All that was sampled in training and evaluations."""
    paths = [path for folder in ("archive", "evaluations") for path in sorted((out / folder).glob("*.parquet"))]
    return [
        (path.name, turn.prompt.tobytes(), turn.action.tobytes(), turn.logprobs.tobytes())
        for path in paths
        for record in read_step(path)
        for made in (*record.group.trajectories, *record.group.failed)
        for turn in made.turns
    ]


def children() -> set[int]:
    """Processes that this one has started."""
    listed = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in listed for pid in path.read_text().split()}


@pytest.mark.slow
def test_any_number_of_workers_samples_the_same_tokens_and_leaves_no_process(tmp_path: Path) -> None:
    """Also where fewer environments may be open than there are attempts: who waits for whom is the same."""
    before, found = children(), []
    for workers in (0, 1, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        recipe = micro_recipe(
            folder, f"cluster.rollout_workers={workers}", "env.0.concurrency.max_open=5", "evaluation.every=1", *SMALL
        )
        train(recipe)
        out = Path(recipe.out)
        found.append((sampled_by(out), untimed(out / "metrics.jsonl"), left_by(recipe)[1:]))
    assert len(found[0][0]) > 100
    assert found[0] == found[1] == found[2]
    assert children() <= before


@pytest.mark.slow
def test_a_killed_worker_costs_no_group_and_no_group_is_trained_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, killed = children(), []

    class Killer(SilentScreen):
        def show(self, done: int, metrics: object) -> None:
            if "warm" not in self.what and done in (1, 2):
                killed.append(min(children() - before - set(killed)))
                os.kill(killed[-1], signal.SIGKILL)

    recipe = micro_recipe(tmp_path, "cluster.rollout_workers=2", "max_lag=1", *SMALL, "steps=4")
    summary = train(recipe, Killer())
    assert summary is not None
    assert (summary["updates"], len(killed)) == (4, 2)
    assert summary["lag_max"] <= 1
    assert caplog.text.count("is started again: process") == 2
    archive = sorted((Path(recipe.out) / "archive").glob("*.parquet"))
    trained = [record.group.task.id for path in archive for record in read_step(path)]
    with open_environments(recipe) as environments:
        order = training_order(recipe, environments)
        drawn = [order.draw().task.id for _ in trained]
    assert trained == drawn
    assert children() <= before


@pytest.mark.slow
def test_a_run_with_workers_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = (
        micro_recipe(tmp_path, f"out={tmp_path / out}", "cluster.rollout_workers=2", "checkpoints.every=1", *SMALL)
        for out in ("whole", "parts")
    )
    train(whole)
    stop = asyncio.Event()

    class Stopper(SilentScreen):
        def show(self, done: int, metrics: object) -> None:
            if "warm" not in self.what and done == 1:
                stop.set()

    assert in_run_loop(run.start(parts, Stopper(), stop)) is None
    resume(Path(parts.out))
    assert sampled_by(Path(parts.out)) == sampled_by(Path(whole.out))
    assert left_by(parts)[1:] == left_by(whole)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_run(tmp_path: Path, number: signal.Signals) -> None:
    overrides = [f"out={tmp_path / 'run'}", "cluster.rollout_workers=2", "steps=100000", "max_lag=1"]
    command = [sys.executable, "-m", "turnwise.cli", "train", str(micro_toml(tmp_path)), *overrides]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            metrics = tmp_path / "run" / "metrics.jsonl"
            while driver.poll() is None and (not metrics.exists() or len(metrics.read_text().splitlines()) < 2):
                time.sleep(0.2)
            assert driver.poll() is None
            listed = Path(f"/proc/{driver.pid}/task").glob("*/children")
            workers = [int(pid) for path in listed for pid in path.read_text().split()]
            assert len(workers) == 2
            driver.send_signal(number)
            driver.wait()
        finally:
            driver.kill()
    while any(Path(f"/proc/{pid}/cmdline").exists() and is_worker(pid) for pid in workers):
        time.sleep(0.1)  # the test's own time limit ends this


def is_worker(pid: int) -> bool:
    """Whether a process still runs a worker; one that has ended has no command any more."""
    try:
        return b"turnwise.engines.remote.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# ---------------------------------------------------------------- settings


class Lonely:
    """An environment of a session."""

    def open(self, task: Any) -> Reply:
        raise NotImplementedError

    def step(self, message: Any) -> Reply:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @classmethod
    def tasks(cls, split: str, seed: int) -> list[Any]:
        return []


def drive(task: Any, model: str) -> None:
    """An agent."""


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"name": "hops", "agent": "cluster.test_rollout_workers:drive"}, "an agent drives hops through the endpoint"),
        ({"name": "guess", "concurrency": {"actors": 2}}, "environments of guess are in processes already"),
        (
            {"name": "textarena:Nim-v0", "settings": {"opponent": "frozen"}},
            "is played by an engine that only the run's",
        ),
        ({"name": "live:Lonely"}, "Lonely is a class of this session"),
    ],
)
def test_what_workers_cannot_do_is_refused_in_one_line(env: dict[str, Any], message: str) -> None:
    with lent({"live:Lonely": Lonely}):
        for workers in (0, 2):
            on = {"placement": "colocated"} if "concurrency" in env else {}
            recipe = parse_recipe({"env": [env], "cluster": {"rollout_workers": workers, **on}}, "test.toml")
            if workers:
                with pytest.raises(ValueError, match=message) as refused:
                    check_workers(recipe)
                assert "\n" not in str(refused.value)
                assert "cluster.rollout_workers" in str(refused.value)
            else:
                check_workers(recipe)


def test_reports_of_workers_are_joined() -> None:
    nan = float("nan")
    one = {"b/s/calls": 2.0, "b/s/items": 6.0, "b/s/size_mean": 3.0, "b/s/size_max": 4.0, "b/s/wait_seconds": 0.5}
    other = {"b/s/calls": 1.0, "b/s/items": 2.0, "b/s/size_mean": 2.0, "b/s/size_max": 2.0, "b/s/wait_seconds": 0.1}
    idle = {"b/s/calls": 0.0, "b/s/items": 0.0, "b/s/size_mean": nan, "b/s/size_max": 0.0, "b/s/wait_seconds": nan}
    joined = joined_reports(
        [
            {**one, "b/s/flush/full": 1.0, "b/s/fitted/per_call": 0.2},
            {**other, "b/s/flush/full": 2.0, "b/s/fitted/per_call": nan},
            idle,
        ]
    )
    assert (joined["b/s/calls"], joined["b/s/items"]) == (3.0, 8.0)
    assert joined["b/s/size_mean"] == pytest.approx(8 / 3)
    assert joined["b/s/size_max"] == 4.0
    assert joined["b/s/wait_seconds"] == pytest.approx((0.5 * 6 + 0.1 * 2) / 8)
    assert joined["b/s/flush/full"] == 3.0
    assert joined["b/s/fitted/per_call"] == pytest.approx(0.2)
    assert joined_reports([idle])["b/s/size_mean"] != joined_reports([idle])["b/s/size_mean"]
