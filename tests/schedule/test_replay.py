"""Whole asynchronous runs under the virtual clock, with slow environments, failures and lag: the same each time."""

import asyncio
import hashlib
from random import Random

import pytest

from support.running import SilentScreen, micro_recipe, untimed
from turnwise.assemble.run import restored, started
from turnwise.runs.archive import archived_steps, read_step
from turnwise.runs.checkpoint import latest_checkpoint
from turnwise.runs.folder import RunFolder
from turnwise.testing import clock
from turnwise.testing.workers import in_virtual_time
from turnwise.types import turns_of


def slow_recipe(folder, out, *overrides):
    common = (
        "env.0.name=support.slow:Slow",
        "env.0.dataset=hops",
        "max_lag=2",
        "steps=4",
        "sft.updates=0",
        "weight_check.every=1",
    )
    evaluations = ("evaluation.every=0", "evaluation.final_tasks=4")
    return micro_recipe(folder, *common, *evaluations, f"out={folder / out}", *overrides)


def durations(seed):
    """Workers whose calls take times of their own: tenths of a second for steps of the engine, seconds for the
    learner's."""
    scale = {"engine": 0.3, "learner": 8.0, "checkpoint": 2.0, "record": 0.2}

    def worker(name):
        random = Random(f"{seed} {name}")
        return in_virtual_time(lambda: scale[name] * random.uniform(0.5, 1.5))

    return worker


async def played(recipe, seed, until=None):
    """A run from its start, or from its last checkpoint, to its end or to a step."""
    screen, stop = SilentScreen(), asyncio.Event()
    if until is not None:
        screen.show = lambda done, metrics: stop.set() if done == until else None
    try:
        folder = RunFolder.open(recipe.out)
    except ValueError:
        opened = started(recipe, RunFolder.create(recipe.out, {}), screen, asyncio.Event(), durations(seed))
    else:
        opened = restored(recipe, folder, latest_checkpoint(folder.checkpoints), screen, durations(seed))
    async with opened as run:
        await run.to_end(stop)
    return asyncio.get_running_loop().time()


def fingerprint(out):
    """Everything that a run recorded, timings of the wall clock aside."""
    folder = RunFolder.open(out)
    digest = hashlib.blake2b()
    for step in archived_steps(folder.archive):
        for record in read_step(folder.archive / f"step-{step:06d}.parquet"):
            digest.update(repr((step, record.group.task, record.kept)).encode())
            for turn in turns_of([record.group]):
                for array in (turn.prompt, turn.action, turn.logprobs, turn.versions):
                    digest.update(array.tobytes())
                digest.update(repr((turn.reward, turn.stop, turn.timing.environment)).encode())
    return untimed(folder.metrics), digest.hexdigest()


@pytest.mark.parametrize(
    "overrides", [(), ("schedule.order=finished", "schedule.stale=mask_turn")], ids=["started", "finished"]
)
def test_an_asynchronous_run_replays_bit_for_bit(tmp_path, overrides):
    ends = []
    for out in ("one", "two"):
        ends.append(clock.run(played(slow_recipe(tmp_path, out, *overrides), seed=1), seed=5))
    assert ends[0] == ends[1] > 20.0  # virtual seconds
    metrics, digest = fingerprint(tmp_path / "one")
    assert (metrics, digest) == fingerprint(tmp_path / "two")
    assert max(line["lag/max"] for line in metrics[1:]) > 0
    assert sum(line["status/failed"] + line["status/timed_out"] for line in metrics[1:]) > 0


def test_other_durations_make_another_run(tmp_path):
    """What is the same each time does depend on time: versions change in the middle of attempts elsewhere."""
    for out, seed in (("one", 1), ("two", 2)):
        clock.run(played(slow_recipe(tmp_path, out), seed), seed=5)
    assert fingerprint(tmp_path / "one")[1] != fingerprint(tmp_path / "two")[1]
