"""Whole runs whose evaluations go on beside training: each of one version, the same as if training had waited.

But for the first they go by the virtual clock, under which engines, learner and environments overlap the same way each
time.
"""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

import turnwise.learn.losses as losses
from support import calling
from support.calling import watch
from support.running import SilentScreen, micro_recipe, train, untimed
from turnwise.assemble import run
from turnwise.evaluation.evaluator import Evaluator
from turnwise.runs.archive import read_step
from turnwise.runs.checkpoint import latest_checkpoint
from turnwise.runs.evaluations import evaluated
from turnwise.runs.folder import RunFolder
from turnwise.schedule.stopping import RunStopped
from turnwise.testing import clock
from turnwise.testing.workers import in_virtual_time


@pytest.fixture(autouse=True)
def new_watch():
    for name, value in vars(calling.Watch()).items():
        setattr(watch, name, value)


def slow_recipe(folder, out, *overrides):
    common = (
        "env.0.name=support.calling:Lookups",
        "env.0.dataset=hops",
        "sft.updates=0",
        "steps=7",
        "evaluation.every=3",
    )
    heldout = (
        "schedule.overlap_evaluations=true",
        "evaluation.final_tasks=1",
        "evaluation.tasks=2",
        "evaluation.attempts=2",
    )
    sizes = ("groups_per_step=2", "rollout.group_size=2", "rollout.max_turns=2", "rollout.max_action_tokens=3")
    return micro_recipe(
        folder, *common, *heldout, *sizes, "rollout.limits.call_seconds=1000", f"out={folder / out}", *overrides
    )


def workers(name):
    seconds = {"engine": 0.1, "evaluation": 0.1, "learner": 5.0, "checkpoint": 0.1, "record": 0.0}
    return in_virtual_time(lambda: seconds[name])


async def played(recipe, stop_at=None):
    """A run from its start, or from its last checkpoint, to its end or to a step."""
    screen, stop = SilentScreen(), asyncio.Event()
    screen.show = lambda done, metrics: stop.set() if done == stop_at else None
    if Path(recipe.out).exists():
        await run.resume(Path(recipe.out), screen, stop, workers=workers)
    else:
        await run.start(recipe, screen, stop, workers=workers)


async def once(condition):
    """Let virtual time go by until something holds."""
    async with asyncio.timeout(10_000):
        while not condition():
            await asyncio.sleep(1.0)


def play(recipe, stop_at=None):
    clock.run(played(recipe, stop_at))
    assert watch.inside == 0  # whatever happened, all environments were closed


def evaluations(out):
    """By (version, kind): all that the metrics say of an evaluation, and all that its attempts did."""
    folder, found = RunFolder.open(out), {}
    for line in untimed(folder.metrics):
        for kind in ("sampled", "greedy"):
            if f"eval/{kind}/version" in line:
                version = int(line[f"eval/{kind}/version"])
                assert (version, kind) not in found
                found[version, kind] = {k: v for k, v in line.items() if k.startswith(f"eval/{kind}/")}
    assert sorted(found) == evaluated(folder.evaluations)
    for version, kind in found:
        path = folder.evaluations / f"step-{version:06d}-{kind}.parquet"
        attempts = [
            (record.group.task.id, made.status, [(t.action.tolist(), t.logprobs.tolist()) for t in made.turns])
            for record in read_step(path)
            for made in (*record.group.trajectories, *record.group.failed)
        ]
        lines = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
        found[version, kind] |= {"attempts": attempts, "lines": lines}
    return found


def training(out):
    """What the metrics say of training alone."""
    path = Path(out, "metrics.jsonl")
    lines = untimed(path) if path.exists() else []
    return [
        {k: v for k, v in line.items() if not k.startswith(("eval/", "batch/"))} for line in lines if "loss" in line
    ]


def logged(out):
    """(step, version) of the evaluations during and after training, in the order they were logged."""
    lines = untimed(RunFolder.open(out).metrics)
    return [(line["step"], int(line["eval/sampled/version"])) for line in lines[1:] if "eval/sampled/version" in line]


def state(out):
    return latest_checkpoint(RunFolder.open(out).checkpoints).state


def checkpoints(out):
    return sorted(int(path.name[-6:]) for path in RunFolder.open(out).checkpoints.glob("step-*"))


# ---------------------------------------------------------------- the same, and meanwhile


def test_at_lag_0_neither_training_nor_evaluations_notice_that_they_overlap(tmp_path):
    """On the wall clock, with threads, and to the last bit: both engines meet the same requests in the same order, so
    that not even rounding differs."""
    common = ("steps=5", "evaluation.tasks=6", "evaluation.attempts=2", "evaluation.final_tasks=4", "sft.updates=0")
    waits = micro_recipe(tmp_path, *common, f"out={tmp_path / 'waits'}")
    overlaps = micro_recipe(tmp_path, *common, f"out={tmp_path / 'overlaps'}", "schedule.overlap_evaluations=true")
    train(waits)
    train(overlaps)
    assert [version for version, _ in evaluations(waits.out)] == [0, 0, 2, 4, 5, 5]
    assert evaluations(waits.out) == evaluations(overlaps.out)
    assert training(waits.out) == training(overlaps.out)
    (step, version), late, last = logged(overlaps.out)
    assert step > version == 2
    assert (late, last) == ((5, 4), (5, 5))  # not known before the last step, and on a line of its own


def test_training_goes_on_during_an_evaluation(tmp_path):
    waits, overlaps = (
        slow_recipe(tmp_path, "waits", "schedule.overlap_evaluations=false"),
        slow_recipe(tmp_path, "overlaps"),
    )
    play(waits)
    assert watch.meanwhile == 0
    assert logged(waits.out) == [(3, 3), (6, 6), (7, 7)]
    play(overlaps)
    assert watch.meanwhile >= 8  # a step's worth of lookups
    assert [version for _, version in logged(overlaps.out)] == [3, 6, 7]
    assert 3 < logged(overlaps.out)[0][0] < 6
    assert evaluations(overlaps.out) == evaluations(waits.out)
    assert training(overlaps.out) == training(waits.out)


@pytest.mark.parametrize("lag", [0, 2])
def test_every_token_of_an_evaluation_is_of_its_version(tmp_path, lag):
    recipe = slow_recipe(tmp_path, "run", f"max_lag={lag}")
    play(recipe)
    assert watch.meanwhile >= 8  # a step's worth of lookups
    assert [version for _, version in logged(recipe.out)] == [3, 6, 7]
    for (version, kind), found in evaluations(recipe.out).items():
        path = RunFolder.open(recipe.out).evaluations / f"step-{version:06d}-{kind}.parquet"
        made = [t for record in read_step(path) for t in (*record.group.trajectories, *record.group.failed)]
        assert {v for trajectory in made for turn in trajectory.turns for v in turn.versions.tolist()} == {version}
        assert {line["version"] for line in found["lines"]} == {version}


def test_calls_of_training_and_evaluation_go_together_and_training_first(tmp_path):
    """All four attempts of each ask at once, in a queue that takes three at a time."""
    watch.opening_seconds = 0.0
    queue = ("env.0.name=support.calling:LookupsTogether", "env.0.batching.slots=1", "env.0.batching.max_batch=3")
    play(slow_recipe(tmp_path, "run", *queue, "max_lag=1"))
    assert all(re.fullmatch("t*h*", call) for call in watch.calls)
    first = watch.calls.index("thh")
    assert watch.calls[first - 1 : first + 1] == ["ttt", "thh"]
    assert "hh" in watch.calls[first:]


def test_the_next_evaluation_waits_for_the_one_before(tmp_path):
    watch.opening_seconds = 900.0
    recipe = slow_recipe(tmp_path, "run")
    play(recipe)
    assert logged(recipe.out) == [(6, 3), (7, 6), (7, 7)]
    assert [line["step"] for line in untimed(RunFolder.open(recipe.out).metrics)] == [*range(7), 7, 7]


def test_the_best_may_be_one_that_was_evaluated_while_others_were_trained(tmp_path):
    """Before training there are 2 sampled attempts and a greedy one; then the 4 of version 3, which alone succeed."""
    watch.paid, watch.opening_seconds = range(3, 7), 40.0
    recipe = slow_recipe(tmp_path, "run", "checkpoints.keep=1", "checkpoints.every=1", "archive.evaluations=1")
    play(recipe, stop_at=4)
    assert (state(recipe.out)["evaluating"], state(recipe.out)["best_step"]) == (3, None)
    assert checkpoints(recipe.out) == [3, 4]  # version 3 may turn out the best
    watch.opened = 3
    play(recipe)
    assert (state(recipe.out)["evaluating"], state(recipe.out)["best_step"]) == (None, 3)
    assert checkpoints(recipe.out) == [3, 7]
    assert {version for version, _ in evaluated(RunFolder.open(recipe.out).evaluations)} == {3, 7}


# ---------------------------------------------------------------- stopped, killed, broken


@pytest.mark.parametrize("checkpoint_every", [1, 100])
def test_a_run_that_was_stopped_has_the_same_evaluations_as_one_that_was_not(tmp_path, checkpoint_every):
    watch.opening_seconds = 60.0
    whole = slow_recipe(tmp_path, "whole")
    play(whole)
    parts = slow_recipe(tmp_path, "parts", f"checkpoints.every={checkpoint_every}")
    for stop_at in (3, 5):  # as the evaluation begins, and within it
        play(parts, stop_at)
        assert (state(parts.out)["progress"]["step"], state(parts.out)["evaluating"]) == (stop_at, 3)
    play(parts)
    assert training(parts.out) == training(whole.out)
    assert evaluations(parts.out) == evaluations(whole.out)


def test_a_run_that_was_killed_begins_the_evaluation_again(tmp_path):
    """The second Ctrl-C, in the middle of a step: nothing is written any more."""
    watch.opening_seconds = 60.0
    whole, killed = slow_recipe(tmp_path, "whole"), slow_recipe(tmp_path, "killed", "checkpoints.every=100")
    play(whole)

    async def cut_short():
        work = asyncio.create_task(played(killed))
        await once(lambda: len(training(killed.out)) == 4)
        assert watch.heldout == 4
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    clock.run(cut_short())
    assert watch.inside == 0
    assert (state(killed.out)["progress"]["step"], state(killed.out)["evaluating"]) == (3, 3)
    play(killed)
    assert training(killed.out) == training(whole.out)
    assert evaluations(killed.out) == evaluations(whole.out)


def test_what_an_evaluation_left_is_cut_away_where_it_is_made_again(tmp_path):
    recipe = slow_recipe(tmp_path, "run")
    watch.opening_seconds = 60.0
    play(recipe, stop_at=4)
    left = RunFolder.open(recipe.out).evaluations / "step-000003-sampled.parquet"
    left.write_bytes(b"of an evaluation that ended, and whose result was not logged")
    play(recipe, stop_at=5)
    assert not left.exists()


def test_a_stop_does_not_wait_for_an_evaluation_that_hangs(tmp_path):
    recipe = slow_recipe(tmp_path, "run", "rollout.limits.attempt_seconds=50000", "rollout.limits.call_seconds=50000")

    async def hang_later():
        work = asyncio.create_task(played(recipe, stop_at=5))
        await once(lambda: latest_checkpoint(RunFolder(tmp_path / "run").checkpoints) is not None)
        watch.hangs = True
        await work
        return asyncio.get_running_loop().time()

    assert clock.run(hang_later()) < 1000
    assert watch.inside == 0
    assert (state(recipe.out)["progress"]["step"], state(recipe.out)["evaluating"]) == (5, 3)


def test_a_run_that_cannot_go_on_gives_its_evaluation_up_and_leaves_a_checkpoint(tmp_path, monkeypatch):
    recipe = slow_recipe(tmp_path, "run", "guards.max_nonfinite_updates=1")
    watch.opening_seconds = 900.0
    sound = losses.LOSSES["ppo_clip"].function

    def poisoned(logprobs, old, advantages, **settings):
        terms, measured = sound(logprobs, old, advantages, **settings)
        return terms * (float("nan") if watch.opened > 3 else 1.0), measured

    monkeypatch.setitem(losses.LOSSES, "ppo_clip", losses.Loss(poisoned))
    with pytest.raises(RunStopped, match="non-finite"):
        play(recipe)
    assert watch.inside == 0
    assert (state(recipe.out)["progress"]["step"], state(recipe.out)["evaluating"]) == (4, 3)


def test_an_error_in_an_evaluation_ends_the_run_and_is_seen(tmp_path, monkeypatch):
    recipe = slow_recipe(tmp_path, "run")
    evaluate = Evaluator.evaluate

    async def broken(self, version, *arguments, **settings):
        made = await evaluate(self, version, *arguments, **settings)
        assert version != 3, "a bug in an evaluation"
        return made

    monkeypatch.setattr(Evaluator, "evaluate", broken)
    with pytest.raises(AssertionError, match="a bug in an evaluation"):
        play(recipe)
    assert watch.inside == 0
    assert state(recipe.out)["evaluating"] == 3
    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    play(recipe)
    assert [version for _, version in logged(recipe.out)] == [3, 6, 7]


def test_a_checkpoint_that_is_gone_is_asked_for(tmp_path):
    recipe = slow_recipe(tmp_path, "run", "checkpoints.every=1")
    watch.opening_seconds = 900.0
    play(recipe, stop_at=4)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    with pytest.raises(ValueError, match="step-000003 is not there, and its evaluation has not ended"):
        play(recipe)
