"""A replay of a recorded run: the same updates bit for bit, without anything that samples."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from support.acting import group
from support.replaying import copied, record_run, recorded_recipe, same_weights, weights_of
from support.running import SilentScreen, train, untimed
from turnwise.assemble import engines
from turnwise.assemble.replay import refuse_ignored, replaying, resuming_replay, without_evaluation
from turnwise.assemble.run import resume
from turnwise.credit.failure import pay
from turnwise.recipe.parse import parse_recipe
from turnwise.recipe.schema import Recipe
from turnwise.runs.archive import read_step, step_path
from turnwise.runs.recorded_archive import RecordedArchive
from turnwise.schedule.stopping import RunStopped
from turnwise.types import Status, Trajectory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"))


def recipe_of(recorded: Path, out: Path, *overrides: str) -> Recipe:
    return recorded_recipe(recorded.parent, f"out={out}", *overrides)


def replay(
    recipe: Recipe, recorded: Path, screen: SilentScreen | None = None, stop: Any = None
) -> dict[str, Any] | None:
    async def work() -> dict[str, Any] | None:
        event = stop or asyncio.Event()
        async with replaying(recipe, RecordedArchive.open(recorded), screen or SilentScreen(), event) as run:
            return await run.to_end(event)

    return asyncio.run(work())


def training_lines(run: Path) -> list[dict[str, Any]]:
    """Metrics of the steps without those that a replay does not make."""
    others = ("eval/", "batch/", "tasks/")
    return [{k: v for k, v in line.items() if not k.startswith(others)} for line in untimed(run / "metrics.jsonl")[1:]]


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may make an engine that samples."""

    def fail(*_: Any) -> Any:
        raise AssertionError("a replay has opened an engine")

    monkeypatch.setattr(engines, "ENGINES", dict.fromkeys(engines.ENGINES, fail))
    monkeypatch.setattr("turnwise.assemble.run.engine_of", fail)


def test_the_recorded_run_has_something_to_replay(recorded: Path) -> None:
    lines = training_lines(recorded)
    assert all(line["gradient_norm"] > 0 for line in lines)
    assert sum(line["groups/dropped"] for line in lines) > 0
    name = "model.embed_tokens.weight"
    assert weights_of(recorded, 0)[name].tobytes() != weights_of(recorded, 1)[name].tobytes()


def test_the_first_update_is_the_recorded_one_bit_for_bit(recorded: Path, tmp_path: Path, no_engine: None) -> None:
    replay(recipe_of(recorded, tmp_path / "one", "steps=1"), recorded)
    assert training_lines(tmp_path / "one") == training_lines(recorded)[:1]
    assert same_weights(recorded, tmp_path / "one", 0)
    assert same_weights(recorded, tmp_path / "one", 1)


def test_a_whole_replay_has_the_weights_and_the_groups_of_the_run(
    recorded: Path, tmp_path: Path, no_engine: None
) -> None:
    screen = SilentScreen()
    summary = replay(recipe_of(recorded, tmp_path / "all"), recorded, screen)
    assert summary is not None
    assert summary["before"] == summary["after"] == {}
    assert screen.said == [f"replay: trains on steps 1 to 3 of {recorded}; no engine, so nothing is evaluated"]
    assert training_lines(tmp_path / "all") == training_lines(recorded)
    for step in (1, 2, 3):
        assert same_weights(recorded, tmp_path / "all", step)
        made, again = (read_step(step_path(run / "archive", step)) for run in (recorded, tmp_path / "all"))
        assert [record.group.task.id for record in made if record.kept] == [
            record.group.task.id for record in again if record.kept
        ]
        for one, other in zip(made, again, strict=True):
            assert [array.tolist() for array in one.credit] == [array.tolist() for array in other.credit]


def test_another_learning_rate_trains_other_weights_on_the_same_groups(recorded: Path, tmp_path: Path) -> None:
    replay(recipe_of(recorded, tmp_path / "fast", "optimizer.learning_rate=0.1"), recorded)
    lines, before = training_lines(tmp_path / "fast"), training_lines(recorded)
    assert lines[0]["gradient_norm"] == before[0]["gradient_norm"]
    assert not same_weights(recorded, tmp_path / "fast", 1)
    assert lines[2]["gap/mean"] > 1e-3  # the recorded logprobs are not those of these weights, and that is no error
    assert [line["reward/mean"] for line in lines] == [line["reward/mean"] for line in before]


def test_a_replay_that_was_stopped_goes_on_to_the_same_weights(recorded: Path, tmp_path: Path, no_engine: None) -> None:
    out, stop = tmp_path / "parts", asyncio.Event()

    class Stopper(SilentScreen):
        def show(self, done: int, metrics: Any) -> None:
            if done == 1:
                stop.set()

    assert replay(recipe_of(recorded, out), recorded, Stopper(), stop) is None
    with pytest.raises(ValueError, match="is made of another run"):
        asyncio.run(resume(out, SilentScreen(), asyncio.Event()))

    async def work() -> dict[str, Any] | None:
        event = asyncio.Event()
        async with resuming_replay(out, SilentScreen(), event) as run:
            return await run.to_end(event)

    summary = asyncio.run(work())
    assert summary is not None
    assert summary["updates"] == 3
    assert same_weights(recorded, out, 3)


def test_an_asynchronous_run_is_replayed_with_its_lag(tmp_path: Path) -> None:
    run = record_run(tmp_path, "max_lag=1", "steps=4")
    replay(recorded_recipe(tmp_path, f"out={tmp_path / 'again'}", "max_lag=1", "steps=4"), run)
    lines = training_lines(tmp_path / "again")
    assert max(line["lag/max"] for line in lines) == 1
    names = ("loss", "gradient_norm", "lag/max", "lag/mean")
    assert [[line[name] for name in names] for line in lines] == [
        [line[name] for name in names] for line in training_lines(run)
    ]
    assert same_weights(run, tmp_path / "again", 4)


@pytest.mark.parametrize(
    "overrides",
    [
        ["credit={name='gae'}", "filter.name=keep_all"],
        ["kl.coefficient=0.1"],
        ["groups_per_update=2", "epochs=2", "loss.anchor=learner"],
        ["max_lag=1", "schedule.order=finished", "schedule.stale=mask_turn"],
    ],
    ids=["critic", "reference", "mini-batches", "finished"],
)
def test_other_objectives_are_replayed_bit_for_bit_too(recorded: Path, tmp_path: Path, overrides: list[str]) -> None:
    train(recipe_of(recorded, tmp_path / "made", "steps=2", *overrides))
    replay(recipe_of(recorded, tmp_path / "again", "steps=2", *overrides), tmp_path / "made")
    assert same_weights(tmp_path / "made", tmp_path / "again", 2)
    assert not same_weights(tmp_path / "made", recorded, 2)


def test_an_archive_that_begins_later_counts_versions_from_there(recorded: Path, tmp_path: Path) -> None:
    run = copied(recorded, tmp_path)
    step_path(run / "archive", 1).unlink()
    screen = SilentScreen()
    start = f"model={{path='{recorded / 'checkpoints' / 'step-000001'}', threads=1}}"
    replay(recipe_of(recorded, tmp_path / "late", start, "steps=2"), run, screen)
    assert "begins with step 2" in screen.said[1]
    lines = training_lines(tmp_path / "late")
    assert [line["lag/max"] for line in lines] == [0, 0]
    assert lines[0]["gap/max"] < 1e-5  # the weights of step 1 have sampled the groups of step 2
    assert lines[0]["gradient_norm"] == training_lines(recorded)[1]["gradient_norm"]


def test_a_step_that_is_gone_is_left_out_and_said_to_be(recorded: Path, tmp_path: Path) -> None:
    run = copied(recorded, tmp_path)
    step_path(run / "archive", 2).unlink()
    screen = SilentScreen()
    replay(recipe_of(recorded, tmp_path / "gap", "steps=2"), run, screen)
    assert screen.said[1] == "replay: not in the archive, and left out: step 2"
    assert [line["reward/mean"] for line in training_lines(tmp_path / "gap")] == [
        training_lines(recorded)[step]["reward/mean"] for step in (0, 2)
    ]


def test_failures_that_were_paid_are_not_paid_twice() -> None:
    lost = Trajectory(group(1.0).trajectories[0].turns, Status.failed, failure="gone")
    once = pay(group(1.0, 0.0, failed=[lost]), value=-1.0)
    twice = pay(once, value=-1.0)
    assert [(one.total, one.status) for one in once.trajectories] == [
        (one.total, one.status) for one in twice.trajectories
    ]
    assert len(once.trajectories) == 3


def test_a_replay_stops_with_a_checkpoint_when_the_groups_are_used_up(recorded: Path, tmp_path: Path) -> None:
    screen = SilentScreen()
    with pytest.raises(RunStopped, match=r"all \d+ groups that .* recorded have been drawn"):
        replay(recipe_of(recorded, tmp_path / "long", "steps=9"), recorded, screen)
    assert "3 steps are recorded, and steps = 9" in screen.said[1]
    assert same_weights(recorded, tmp_path / "long", 3)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("sampling.temperature=0.5", "the recorded logprobs are those at 1"),
        ("cluster.placement=colocated", "no engine to place"),
    ],
)
def test_what_cannot_be_replayed_is_refused(recorded: Path, tmp_path: Path, override: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        replay(recipe_of(recorded, tmp_path / "no", override), recorded)
    assert not (tmp_path / "no").exists()


def test_failures_that_were_paid_cannot_be_paid_otherwise(recorded: Path, tmp_path: Path) -> None:
    run = copied(recorded, tmp_path)
    (run / "SHA256SUMS").unlink()
    config = json.loads((run / "config.json").read_text())
    config["rollout"]["failures"]["on_failure"] = {"name": "pay", "value": -1.0}
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="on_failure differs from the recorded"):
        replay(recipe_of(recorded, tmp_path / "no"), run)


def test_a_model_with_another_vocabulary_is_refused(recorded: Path, tmp_path: Path) -> None:
    other = recipe_of(recorded, tmp_path / "no", "model={path='tiny', hidden=32, layers=1, threads=1}", "seed=5")
    other = other.model_copy(update={"env": (other.env[0].model_copy(update={"tasks": {"links": [3, 9]}}),)})
    with pytest.raises(ValueError, match="another vocabulary"):
        replay(other, recorded)
    assert not (tmp_path / "no").exists()


def test_a_conversation_that_does_not_fit_stops_the_replay(recorded: Path, tmp_path: Path) -> None:
    short = ["rollout.max_trajectory_tokens=40", "rollout.max_prompt_tokens=30"]
    with pytest.raises(RunStopped, match=r"cannot be replayed: a turn has \d+ tokens"):
        replay(recipe_of(recorded, tmp_path / "short", *short), recorded)


@pytest.mark.parametrize("override", ["evaluation.every=5", "engine.max_num_seqs=4", "weight_check.every=1"])
def test_overrides_for_an_engine_are_refused(override: str) -> None:
    with pytest.raises(ValueError, match="would be ignored: a replay has no engine"):
        refuse_ignored(["steps=3", override])
    refuse_ignored(["steps=3", "sampling.temperature=1.0"])


def test_the_recipe_of_a_replay_can_be_read_again(recorded: Path, tmp_path: Path) -> None:
    """Also that of a run whose evaluations overlapped training."""
    recipe = parse_recipe({"env": [{"name": "hops"}], "schedule": {"overlap_evaluations": True}, "max_lag": 1}, "test")
    quiet = without_evaluation(recipe)
    assert (quiet.evaluation.every, quiet.schedule.overlap_evaluations) == (0, False)
    assert parse_recipe(quiet.model_dump(mode="json"), "again") == quiet
