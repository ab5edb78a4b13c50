"""Environments that hold up the event loop or do not let go of it, and people who want it to stop."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from support.acting import Puppet, attempted
from support.running import untimed
from turnwise.envs.base import Reply
from turnwise.rollout import leaving
from turnwise.runs.checkpoint import latest_checkpoint
from turnwise.schedule.watchdog import Watchdog
from turnwise.testing.micro import MICRO
from turnwise.types import Status

PATIENCE = 300.0
DONE = Reply(finished=True, outcome=1.0)

pytestmark = pytest.mark.timeout(700)


def watched(work, blocked_seconds=0.3):
    async def bounded(stop):
        async with asyncio.timeout(PATIENCE):
            return await work

    return Watchdog(say=print, blocked_seconds=blocked_seconds, farewell="bye").run(bounded)


async def sleeps():
    time.sleep(1000)


async def spins():
    while True:
        with suppress(Exception):
            sum(range(1000))


async def interrupts():
    raise KeyboardInterrupt


async def exits():
    raise SystemExit(3)


async def stops():
    asyncio.get_running_loop().stop()
    return DONE


@pytest.mark.parametrize(
    ("bad", "status", "reason"),
    [
        (sleeps, Status.timed_out, "held up the event loop"),
        (spins, Status.timed_out, "held up the event loop"),
        (interrupts, Status.failed, "KeyboardInterrupt"),
        (exits, Status.failed, "SystemExit"),
        (stops, Status.failed, "may not stop the event loop"),
    ],
)
@pytest.mark.parametrize("where", ["open", "step", "close"])
def test_an_environment_that_would_end_or_stop_the_run_costs_its_attempt(bad, status, reason, where, caplog):
    puppet = Puppet(
        bad if where == "step" else DONE,
        opening=bad if where == "open" else None,
        closing=bad if where == "close" else None,
    )

    async def work():
        return await attempted(puppet), await attempted(Puppet(DONE))

    made, after = watched(work())
    assert made.status == (Status.failed if where == "close" else status)
    assert after.status == Status.finished
    assert reason in caplog.text
    if status == Status.timed_out:
        assert f"train/hops/t-1/0/0/0, at {__file__}:" in caplog.text
        assert f"in {bad.__name__}: holds up the event loop" in caplog.text


def test_a_constructor_that_blocks_is_environment_code_too(caplog):
    def make():
        time.sleep(1000)

    assert watched(attempted(make)).status == Status.timed_out
    assert "in make: holds up" in caplog.text


def test_work_of_our_own_may_take_its_time(caplog):
    """An update or a checkpoint runs in the loop too, and is nobody's fault."""
    from turnwise.schedule.workers import inline

    async def work():
        await inline(time.sleep, 1.2)
        return await attempted(Puppet(DONE))

    assert watched(work(), blocked_seconds=0.1).status == Status.finished
    assert caplog.text == ""


def stubborn(still):
    async def swallows():
        while still:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        return DONE

    return swallows


@pytest.mark.parametrize("where", ["open", "step", "close"])
def test_an_environment_that_swallows_its_cancellation_is_left_behind_and_named(where, caplog):
    still = [True]
    bad = stubborn(still)
    puppet = Puppet(
        bad if where == "step" else DONE,
        opening=bad if where == "open" else None,
        closing=bad if where == "close" else None,
    )

    async def work():
        bounds = {"call_seconds": 0.2, "grace": 0.2}
        return await attempted(puppet, **bounds), await attempted(Puppet(DONE))

    before = len(leaving.LEFT)
    made, after = watched(work())
    assert (made.status, after.status) == (Status.timed_out, Status.finished)
    assert len(leaving.LEFT) == before + 1  # and the loop has ended without it
    [line] = [record.getMessage() for record in caplog.records if "is left behind" in record.getMessage()]
    assert line.startswith("train/hops/t-1/0/0/0 does not end when it is cancelled")
    assert f"{__file__}:" in line


def test_a_cancelled_attempt_that_does_not_end_delays_nothing():
    async def work():
        task = asyncio.create_task(attempted(Puppet(stubborn([True])), call_seconds=1000.0, grace=0.2))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert watched(work())


# ---------------------------------------------------------------- whole runs

WORLD = """
import asyncio, time
from pathlib import Path
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.types import Task


class World:
    def __init__(self, how: str, trigger: str):
        self.how, self.trigger = how, Path(trigger)

    @staticmethod
    def tasks(split: str, seed: int):
        return [Task(f"{split}-{n}", "world", {}) for n in range(32)]

    async def open(self, task):
        self.task = task
        return Reply((Message("user", "go"),))

    async def step(self, message):
        if self.trigger.exists() and self.task.id.startswith("train"):
            Path(f"{self.trigger}.met").touch()
            await getattr(self, self.how)()
        return Reply(finished=True, outcome=float(len(message.content) % 2))

    async def close(self):
        return None

    async def sleep(self):
        time.sleep(1000)

    async def immune(self):
        while True:
            try:
                time.sleep(1000)
            except BaseException:
                pass

    async def swallow(self):
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
"""


class Started:
    """A run in a process of its own, in which the environment goes wrong once `trigger` exists."""

    def __init__(self, folder, how, *overrides):
        (folder / "world.py").write_text(WORLD)
        self.out, self.trigger = folder / "run", folder / "trigger"
        recipe = folder / "micro.toml"
        recipe.write_text(MICRO)
        env = f"env=[{{name='world:World',settings={{how='{how}',trigger='{self.trigger}'}}}}]"
        settings = ["sft.updates=0", "steps=100000", "evaluation.every=0", "checkpoints.every=100000", env]
        command = [
            sys.executable,
            "-m",
            "turnwise.cli",
            "train",
            str(recipe),
            f"out={self.out}",
            *settings,
            *overrides,
        ]
        paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )

    def reach(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)

    def steps(self):
        metrics = self.out / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def go_wrong(self):
        """Go on until some steps are made and the environment has gone wrong."""
        self.reach(lambda: self.steps() >= 3)
        self.trigger.touch()
        self.reach(Path(f"{self.trigger}.met").exists)

    def ended(self):
        """(exit code, what it printed)."""
        try:
            said, errors = self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise AssertionError("it hangs") from None
        for before, line in pairwise(errors.splitlines()):  # of the environment's attempt, and no other
            assert not line.startswith("Traceback") or before.startswith("warning: "), errors
        return self.process.returncode, said + errors

    def last_step(self):
        return untimed(self.out / "metrics.jsonl")[-1]["step"]


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("sleep", signal.SIGTERM),
        pytest.param("sleep", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("swallow", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("swallow", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_one_signal_ends_a_run_whose_environment_hangs_with_a_checkpoint(tmp_path, how, number):
    run = Started(tmp_path, how)
    run.go_wrong()
    run.process.send_signal(number)
    code, said = run.ended()
    assert code == 130, said
    assert f"go on with: turnwise train --resume {run.out}" in said
    assert latest_checkpoint(run.out / "checkpoints").step == run.last_step() >= 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["immune", "swallow"])
def test_two_signals_end_the_process_whatever_its_environment_does(tmp_path, how):
    run = Started(tmp_path, how)
    run.go_wrong()
    for _ in range(2):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    code, said = run.ended()
    assert code != 0
    assert f"turnwise train --resume {run.out}" in said
    assert latest_checkpoint(run.out / "checkpoints").step == 0


@pytest.mark.slow
def test_a_run_that_cannot_be_helped_ends_and_says_where_it_hung(tmp_path):
    run = Started(tmp_path, "immune", "rollout.limits.blocked_seconds=1")
    run.go_wrong()
    code, said = run.ended()
    assert code == 1
    [line] = [line for line in said.splitlines() if line.startswith("turnwise: the run stopped:")]
    assert f"{tmp_path / 'world.py'}:" in line
    assert "in immune holds up the event loop and cannot be interrupted" in line
    assert f"turnwise train --resume {run.out}" in line
    assert "holds up the event loop" in (run.out / "events.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleep", "swallow"])
def test_a_run_goes_on_when_the_hanging_is_over(tmp_path, how):
    run = Started(
        tmp_path, how, "rollout.limits.blocked_seconds=1", "rollout.limits.call_seconds=1", "rollout.failures.retries=0"
    )
    run.go_wrong()
    run.trigger.unlink()
    steps = run.steps()
    run.reach(lambda: run.steps() > steps + 3)
    run.process.send_signal(signal.SIGINT)
    code, said = run.ended()
    assert code == 130, said
    lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("status/timed_out", 0.0) for line in lines) > 0
    assert latest_checkpoint(run.out / "checkpoints").step == run.last_step()
