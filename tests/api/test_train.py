"""Training from Python: the run of the command line, callbacks, classes of a session, stops and resumes."""

import asyncio
import json
import logging
import math
import threading
from pathlib import Path

import pytest
import torch

import turnwise as tw
from support.running import micro_recipe, micro_toml, mistake, untimed
from support.sessions import make_echo, small, without_environment
from turnwise.api.background import Background
from turnwise.api.callbacks import Callbacks
from turnwise.cli.commands import main

Echo = make_echo()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of Echo from its start to its end, and the moments that callbacks heard of."""
    heard = []
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNWISE_STATE", str(folder.parent / "state"))
        run = tw.train(
            without_environment(),
            environment=Echo,
            out=folder,
            on_step=heard.append,
            on_evaluation=heard.append,
            on_checkpoint=heard.append,
            show=False,
        )
    return run, heard


def moments(heard):
    names = {tw.StepDone: "step", tw.Evaluation: "evaluation", tw.Checkpoint: "checkpoint"}
    return [
        (names[type(one)], getattr(one, "step", None) if type(one) is not tw.Evaluation else one.version)
        for one in heard
    ]


def test_the_run_is_that_of_the_command_line_bit_for_bit(tmp_path, monkeypatch):
    recipe = small(checkpoints={"every": 4, "keep": 1})
    run = tw.train(recipe, out=tmp_path / "python", on_step=lambda step: None, show=False)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(recipe.tree))
    monkeypatch.setattr("turnwise.recipe.parse.tomllib.load", json.load)
    assert main(["train", str(path), f"out={tmp_path / 'command'}"]) == 0
    assert untimed(run.folder.metrics) == untimed(tmp_path / "command" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("max_lag=0", "epochs=2", "kl.coefficient=0.1")])
def test_the_micro_run_is_that_of_the_command_line_bit_for_bit(tmp_path, overrides):
    assert main(["train", str(micro_toml(tmp_path)), f"out={tmp_path / 'command'}", *overrides]) == 0
    run = tw.train(micro_recipe(tmp_path, *overrides), out=tmp_path / "python", show=False)
    assert untimed(run.folder.metrics) == untimed(tmp_path / "command" / "metrics.jsonl")


def test_callbacks_hear_of_each_moment_once_it_is_recorded(whole):
    run, heard = whole
    assert [moment for moment in moments(heard) if moment[0] != "checkpoint"] == [
        *[("evaluation", 0), ("evaluation", 0)],
        *[("evaluation", 1), ("step", 1)],
        *[("evaluation", 2), ("evaluation", 2), ("step", 2)],
    ]
    # A checkpoint is written while training goes on: it is heard of once it is, and before the next one.
    checkpoints = [place for place, (kind, _) in enumerate(moments(heard)) if kind == "checkpoint"]
    assert [moments(heard)[place][1] for place in checkpoints] == [0, 1, 2]
    for step, place in zip((1, 2), checkpoints[1:], strict=True):
        assert place > moments(heard).index(("evaluation", step))
    [*_, done] = [moment for moment in heard if isinstance(moment, tw.StepDone)]
    logged = {name: value for name, value in run.metrics[-1].items() if name not in ("step", "nonfinite")}
    assert {name: None if math.isnan(value) else value for name, value in done.metrics.items()} == logged
    assert [group.task.id for group in done.kept] == [group.task.id for group in run.groups(2)]
    assert done.dropped == ()
    assert repr(done) == "StepDone(step 2, 2 groups kept, 0 dropped)"
    with pytest.raises(TypeError):
        done.metrics["loss"] = 0.0
    assert (heard[checkpoints[-1]].path / "model.safetensors").is_file()


def test_a_run_says_what_it_recorded(whole):
    run, _ = whole
    assert run.is_finished
    assert run.recipe.env[0].name == "live:Echo"
    assert [step for step, _ in run.series("reward/mean")] == [1, 2]
    assert sorted(run.checkpoints) == [0, 1, 2]
    assert run.checkpoint == run.checkpoints[2]
    assert len(run.trajectories(1)) == 4
    assert len(run.groups(2, "greedy")) == 2
    assert run.records(1)[0].kept
    rows = run.attempts(kind="train", first_step=2)
    assert len(rows) == 4
    assert run.attempt(rows[0]).trajectory.turns[0].said.content in run.text(str(rows[0].key))
    assert run.summary["updates"] == 2
    assert "finished, step 2" in repr(run)
    with pytest.raises(ValueError, match="has no metric reward/men; did you mean reward/mean"):
        run.series("reward/men")
    with pytest.raises(ValueError, match="attempts.kinds: .* did you mean kind"):
        run.attempts(kinds="train")


def test_a_callback_that_raises_stops_the_run_and_loses_nothing(tmp_path, whole):
    def on_step(step):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        tw.train(without_environment(), environment=Echo, out=tmp_path / "run", on_step=on_step, show=False)
    assert "a callback raised this" in caught.value.__notes__[0]
    stopped = tw.load_run(tmp_path / "run")
    assert not stopped.is_finished
    assert sorted(stopped.checkpoints) == [0, 1]
    assert [line["step"] for line in stopped.metrics] == [0, 1]

    with pytest.raises(ValueError, match='"live:Echo" is a class of a Python session'):
        tw.train(resume=tmp_path / "run", show=False)
    resumed = tw.train(resume=tmp_path / "run", environment=Echo, show=False)
    assert untimed(resumed.folder.metrics) == untimed(whole[0].folder.metrics)


def test_a_callback_stops_the_run_by_what_it_returns(tmp_path, capsys):
    seen = []

    def on_evaluation(evaluation):
        seen.append(threading.current_thread())
        return tw.STOP

    run = tw.train(without_environment(), environment=Echo, out=tmp_path / "run", on_evaluation=on_evaluation)
    assert not run.is_finished
    assert [line["step"] for line in run.metrics] == [0]
    assert set(seen) == {threading.current_thread()}
    capsys.readouterr()
    said = mistake(capsys, "train", "--resume", str(run.path))
    assert "go on in Python with environment=Echo" in said
    evaluation = tw.evaluate(run, environment=Echo, tasks=1, show=False)
    assert evaluation.sampled.num_attempts == 1
    assert "eval/greedy/success" in evaluation.metrics


def test_an_interruption_leaves_a_checkpoint(tmp_path):
    def on_step(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"go on with turnwise.train\(resume="):
        tw.train(without_environment(), environment=Echo, out=tmp_path / "run", on_step=on_step, show=False)
    assert sorted(tw.load_run(tmp_path / "run").checkpoints) == [0, 1]


def test_a_running_loop_trains_and_goes_on(tmp_path, whole):
    async def work():
        async def on_step(step):
            await asyncio.sleep(0)
            seen.append(asyncio.get_running_loop())

        run = await tw.train_async(
            without_environment(), environment=lambda: Echo(), out=tmp_path / "run", on_step=on_step, show=False
        )
        return run, asyncio.get_running_loop()

    seen = []
    run, loop = asyncio.run(work())
    assert seen == [loop, loop]
    assert untimed(run.folder.metrics) == untimed(whole[0].folder.metrics)


def test_a_session_is_left_as_it_was(tmp_path):
    threads, propagates = torch.get_num_threads(), logging.getLogger("turnwise").propagate
    with pytest.raises(ValueError, match="has no train tasks"):
        tw.train(without_environment(**{"env.tasks.count": 0}), environment=Echo, out=tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()
    assert torch.get_num_threads() == threads
    assert logging.getLogger("turnwise").propagate == propagates
    assert [thread.name for thread in threading.enumerate() if thread.name == "turnwise"] == []


def test_a_warm_start_of_a_session_is_not_kept(tmp_path, capsys):
    recipe = without_environment(sft={"updates": 1, "batch": 2}, steps=1)
    run = tw.train(recipe, environment=Echo, out=tmp_path / "run", on_checkpoint=lambda made: tw.STOP)
    assert "warm start: not kept, because Echo is a class of this session" in capsys.readouterr().out
    assert list(run.checkpoints) == [0]
    assert not list((tmp_path / "cache").glob("warm-*"))


async def coroutine(step):
    return None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "give a recipe, for instance turnwise.Recipe"),
        ({"recipe": 3}, "a recipe is a turnwise.Recipe, a file or a name, got int"),
        ({"resume": "nowhere"}, "nowhere is not the folder of a run"),
        ({"resume": "nowhere", "out": "x"}, "remove the recipe and out"),
        ({"recipe": tw.Recipe(), "trust": True}, "trust goes with resume"),
        ({"recipe": tw.Recipe(), "changes": ["steps=3"]}, "changes go with resume"),
        ({"recipe": tw.Recipe(), "on_step": coroutine}, "use await turnwise.train_async"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, said):
    with pytest.raises(ValueError) as caught:
        tw.train(**arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_callback_that_answers_nonsense_is_an_error_and_no_other_is_called():
    called = []

    async def work(background):
        callbacks = Callbacks(background, on_checkpoint=lambda made: "yes", on_step=called.append)
        for moment in (tw.Checkpoint(Path("nowhere"), 1, {}), tw.StepDone(1, {}, ())):
            await callbacks.tell(moment)
        return callbacks, background.stop.is_set(), background.has_something_to_lose

    callbacks, stopped, has_something_to_lose = Background(work).attend()
    assert [str(error) for error in callbacks.errors] == ["a callback returns None or turnwise.STOP, got str"]
    assert (called, stopped, has_something_to_lose) == ([], True, True)
