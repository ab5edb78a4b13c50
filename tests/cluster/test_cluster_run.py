"""A whole run whose learner is spread over processes of this machine."""

import asyncio

import pytest

from support.running import SilentScreen, micro_recipe, untimed
from turnwise.assemble import run
from turnwise.runs.folder import RunFolder

FEW = [
    "entropy=0.1",
    "sft.updates=0",
    "steps=2",
    "evaluation.every=0",
    "evaluation.final_tasks=4",
    "checkpoints.every=1",
]


def go(recipe):
    asyncio.run(run.start(recipe, SilentScreen(), asyncio.Event()))


async def stopped_after_a_step(recipe):
    """Ask a run to stop as soon as it has begun: it ends after a whole step, or before the first."""
    stop = asyncio.Event()
    stop.set()
    return await run.start(recipe, SilentScreen(), stop)


@pytest.mark.slow
def test_a_run_over_two_ranks_is_that_of_one_process_and_goes_on_as_one(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = micro_recipe(tmp_path / "one", *FEW), micro_recipe(tmp_path / "two", *FEW, "cluster.fsdp=2")
    go(one)
    assert asyncio.run(stopped_after_a_step(two)) is None
    folder = RunFolder.open(two.out)
    elsewhere = run.resume(folder.path, SilentScreen(), asyncio.Event(), overrides=["cluster.fsdp=1"])
    assert asyncio.run(elsewhere) is not None
    wanted, found = untimed(RunFolder.open(one.out).metrics), untimed(folder.metrics)
    assert len(found) == len(wanted) == 3
    for mine, theirs in zip(found, wanted, strict=True):
        assert theirs.get("gradient_norm", 1.0) > 0
        shared = theirs.keys() - {"passes", "tokens/planned"}  # a layout for two ranks
        assert {k: mine[k] for k in shared} == pytest.approx({k: theirs[k] for k in shared}, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_warm_start_and_critic_learn_over_two_ranks_too(tmp_path):
    recipe = micro_recipe(tmp_path, *FEW, "steps=1", "cluster.fsdp=2", "credit.name=gae", "sft.updates=1")
    go(recipe)
    [_, line] = untimed(RunFolder.open(recipe.out).metrics)
    assert line["critic/skipped"] == line["skipped"] == 0.0
    assert line["gap/mean"] < 1e-4
