"""Whole runs: end to end, repeated, interrupted, resumed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.paths import TESTS
from support.running import SilentScreen, micro_recipe, micro_toml, resume, train, untimed
from turnwise.assemble import run
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.recipe.parse import load_recipe
from turnwise.runs.archive import archived_steps, read_step
from turnwise.runs.checkpoint import latest_checkpoint
from turnwise.runs.evaluations import evaluated
from turnwise.runs.folder import RunFolder
from turnwise.schedule.stopping import RunStopped
from turnwise.types import turns_of


def test_a_run_trains_and_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path, "evaluation.greedy=true", "env.0.fresh=true", "env.0.tasks={links=[1,2]}")
    summary = train(recipe)
    folder = RunFolder.open(recipe.out)
    assert summary == json.loads(folder.summary.read_text())
    assert set(summary) == {"before", "after", "marks", "seconds", "updates", "lag_max"}
    assert set(summary["before"]) == set(summary["after"]) == {"sampled", "greedy"}
    assert summary["updates"] == 4
    assert summary["lag_max"] == 0
    assert folder.curve.read_bytes().startswith(b"\x89PNG")
    lines = untimed(folder.metrics)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[0]["eval/sampled/attempts"] == 16
    assert lines[2]["eval/sampled/attempts"] == 8
    assert archived_steps(folder.archive) == [1, 2, 3, 4]
    assert [version for version, _ in evaluated(folder.evaluations)] == [0, 0, 2, 2, 4, 4]
    assert lines[2]["eval/greedy/attempts"] == 8
    assert lines[4]["tasks/distinct"] == 16
    assert latest_checkpoint(folder.checkpoints).step == 4


def dumps(out: str) -> dict[str, list[Any]]:
    """By file: all that evaluations left on disk, timings aside."""
    found: dict[str, list[Any]] = {}
    for path in sorted(RunFolder.open(out).evaluations.iterdir()):
        if path.suffix == ".jsonl":
            found[path.name] = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            found[path.name] = [
                (record.group.task, trajectory.status, *(a.tolist() for a in (turn.prompt, turn.action, turn.logprobs)))
                for record in read_step(path)
                for trajectory in (*record.group.trajectories, *record.group.failed)
                for turn in trajectory.turns
            ]
    return found


def test_every_attempt_of_an_evaluation_is_left_on_disk_with_its_ids_and_its_version(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path, "steps=2", "evaluation.attempts=3")
    train(recipe)
    folder = RunFolder.open(recipe.out)
    lines = {int(line["step"]): line for line in untimed(folder.metrics)}
    for version, kind in evaluated(folder.evaluations):
        name = folder.evaluations / f"step-{version:06d}-{kind}"
        metrics = {k.removeprefix(f"eval/{kind}/"): v for k, v in lines[version].items()}
        made = [json.loads(line) for line in name.with_suffix(".jsonl").read_text().splitlines()]
        ids = [(line["dataset"], line["task"], line["attempt"], line["turn"]) for line in made]
        assert len(set(ids)) == len(ids) == metrics["turn/count"]
        attempts = {one[:3] for one in ids}
        assert len(attempts) == metrics["attempts"] == (48 if kind == "sampled" else 16)
        assert len({one[1] for one in ids}) == metrics["tasks"] == 16
        assert {line["version"] for line in made} == {version}
        groups = [record.group for record in read_step(name.with_suffix(".parquet"))]
        assert {group.task.id for group in groups} == {one[1] for one in ids}
        assert all((turn.versions == version).all() for turn in turns_of(groups))


def test_the_newest_evaluations_stay_and_those_of_the_best(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path, "evaluation.every=1", "archive.evaluations=2")
    train(recipe)
    folder = RunFolder.open(recipe.out)
    best = latest_checkpoint(folder.checkpoints).state["best_step"]
    assert {version for version, _ in evaluated(folder.evaluations)} == {3, 4, best}


def test_engine_and_learner_agree_on_every_step(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path)
    train(recipe)
    gaps = [line["gap/max"] for line in untimed(RunFolder.open(recipe.out).metrics)[1:]]
    assert len(gaps) == 4
    assert max(gaps) <= 1e-5


def test_the_archive_holds_what_was_trained(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path)
    train(recipe)
    folder = RunFolder.open(recipe.out)
    line = untimed(folder.metrics)[3]
    records = read_step(folder.archive / "step-000003.parquet")
    turns = list(turns_of([record.group for record in records]))
    assert len(turns) == line["turn/count"]
    assert all((turn.versions == 2).all() for turn in turns)
    weights = np.concatenate([weight for record in records for weight in record.weights])
    assert weights.sum() == pytest.approx(1.0, abs=1e-5)
    for record in records:
        totals = [trajectory.total for trajectory in record.group.trajectories]
        trained = any(np.any(credit != 0) for credit in record.credit)
        assert trained == (max(totals) != min(totals))


def test_the_same_seed_gives_the_same_metrics_bit_for_bit(tmp_path: Path) -> None:
    first, second = micro_recipe(tmp_path), micro_recipe(tmp_path, f"out={tmp_path / 'again'}")
    train(first)
    train(second)
    assert untimed(Path(first.out) / "metrics.jsonl") == untimed(Path(second.out) / "metrics.jsonl")
    other = micro_recipe(tmp_path, f"out={tmp_path / 'other'}", "seed=1")
    train(other)
    assert untimed(Path(first.out) / "metrics.jsonl") != untimed(Path(other.out) / "metrics.jsonl")


def test_more_mini_batches_and_epochs_score_old_logprobs_once(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path, "groups_per_update=2", "epochs=2", "loss.anchor=learner", "steps=2")
    summary = train(recipe)
    assert summary["updates"] == 2 * 2 * 2
    assert summary["seconds"]["score"] > 0


def test_several_environments_are_mixed(tmp_path: Path) -> None:
    text = micro_toml(tmp_path)
    mixed = text.read_text().replace("[rollout]", '[[env]]\nname = "guess"\nweight = 3.0\n[rollout]', 1)
    text.write_text(mixed)
    recipe = load_recipe(text, [f"out={tmp_path / 'run'}", "steps=2"])
    train(recipe)
    records = [r for step in (1, 2) for r in read_step(tmp_path / "run" / "archive" / f"step-{step:06d}.parquet")]
    datasets = [record.group.task.dataset for record in records]
    assert datasets.count("guess") == 6
    assert datasets.count("hops") == 2
    assert "success/guess" in untimed(tmp_path / "run" / "metrics.jsonl")[1]


def test_lag_overlaps_and_stays_within_its_bound(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path, "max_lag=2", "steps=6")
    summary = train(recipe)
    assert 1 <= summary["lag_max"] <= 2
    for line in untimed(RunFolder.open(recipe.out).metrics)[1:]:
        assert line["lag/max"] <= 2


def test_bfloat16_trains_with_float32_master_weights(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path, "model.dtype=bfloat16", "steps=2", "loss.anchor=learner")
    train(recipe)
    lines = untimed(RunFolder.open(recipe.out).metrics)[1:]
    assert all(0 < line["gap/mean"] < 0.1 for line in lines)
    assert all(np.isfinite(line["loss"]) for line in lines)


def test_a_stopped_run_resumes_to_the_same_metrics(tmp_path: Path) -> None:
    whole, parts = micro_recipe(tmp_path), micro_recipe(tmp_path, f"out={tmp_path / 'parts'}")
    train(whole)
    stop = asyncio.Event()

    class Stopper(SilentScreen):
        def show(self, done: int, metrics: object) -> None:
            if "warm" not in self.what and done == 3:
                stop.set()

    assert asyncio.run(run.start(parts, Stopper(), stop)) is None
    assert latest_checkpoint(RunFolder.open(parts.out).checkpoints).step == 3
    summary = resume(Path(parts.out))
    assert summary["updates"] == 4
    assert untimed(Path(whole.out) / "metrics.jsonl") == untimed(Path(parts.out) / "metrics.jsonl")
    assert dumps(whole.out) == dumps(parts.out)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path)
    train(recipe)
    before = (Path(recipe.out) / "metrics.jsonl").read_bytes()
    assert resume(Path(recipe.out))["updates"] == 4
    assert (Path(recipe.out) / "metrics.jsonl").read_bytes() == before


KILLED = """
import sys; sys.path.insert(0, {tests!r})
from pathlib import Path
from support.running import micro_recipe, train, resume
if {resume}: resume(Path({out!r}))
else: train(micro_recipe(Path({folder!r}), "out={out}"))
"""


def killed_at(folder: Path, out: Path, lines: int) -> None:
    """Start a run in a process of its own and kill it once its metrics have so many lines."""
    tests = str(TESTS)
    code = KILLED.format(tests=tests, resume=out.exists(), out=str(out), folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= lines:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.002)
    process.wait()


@pytest.mark.parametrize("kills", [(2, 4), pytest.param((1, 2, 3, 4, 5), marks=pytest.mark.slow)])
def test_kill_9_and_resume_gives_the_same_metrics(tmp_path: Path, kills: tuple[int, ...]) -> None:
    whole = micro_recipe(tmp_path)
    train(whole)
    out = tmp_path / "killed"
    for lines in kills:
        killed_at(tmp_path, out, lines)
    resume(out)
    assert untimed(Path(whole.out) / "metrics.jsonl") == untimed(out / "metrics.jsonl")
    assert archived_steps(out / "archive") == [1, 2, 3, 4]
    assert dumps(whole.out) == dumps(str(out))


class AlwaysRaises:
    """An environment that breaks once training begins."""

    @staticmethod
    def tasks(split: str, seed: int, count: int = 8):
        from turnwise.envs.split import draw_tasks

        return draw_tasks("broken", split, count, seed, lambda random: {"n": random.getrandbits(30), "in": split})

    async def open(self, task):
        self.task = task
        return Reply((Message("user", "go"),))

    async def step(self, message):
        if self.task.data["in"] == "train":
            raise RuntimeError("the sandbox is down")
        return Reply(finished=True)

    async def close(self):
        return None


def test_an_environment_that_always_raises_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    text = micro_toml(tmp_path)
    broken = text.read_text().replace('name = "hops"', 'name = "training.test_run:AlwaysRaises"')
    text.write_text(broken.replace("tasks = { count = 64, links = [1, 2] }", "").replace("updates = 4", "updates = 0"))
    recipe = load_recipe(text, [f"out={tmp_path / 'run'}", "guards.max_dropped_groups=8"])
    with pytest.raises(RunStopped, match=r"16 attempts of 4 groups in a row failed.*the sandbox is down.*checkpoint"):
        train(recipe)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").step == 0


def test_non_finite_updates_stop_the_run_after_a_few_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = micro_recipe(tmp_path, "steps=9")
    import turnwise.learn.losses as losses

    def poisoned(logprobs, old, advantages, **_):
        return logprobs * float("nan"), {}

    monkeypatch.setitem(losses.LOSSES, "ppo_clip", losses.Loss(poisoned))
    with pytest.raises(RunStopped, match="3 updates in a row"):
        train(recipe)
    lines = untimed(tmp_path / "run" / "metrics.jsonl")
    assert [line["skipped"] for line in lines[1:]] == [1.0, 1.0, 1.0]
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").step == 3


def test_a_prompt_longer_than_the_context_is_counted_and_stops_with_advice(tmp_path: Path) -> None:
    recipe = micro_recipe(
        tmp_path,
        "rollout.max_prompt_tokens=5",
        "rollout.max_trajectory_tokens=9",
        "guards.max_dropped_groups=8",
        "sft.updates=0",
    )
    with pytest.raises(RunStopped, match="prompt_too_long"):
        train(recipe)
    assert untimed(tmp_path / "run" / "metrics.jsonl")[0]["eval/sampled/status/prompt_too_long"] == 16


def test_the_warm_start_is_made_once(tmp_path: Path) -> None:
    train(micro_recipe(tmp_path))
    screen = SilentScreen()
    train(micro_recipe(tmp_path, f"out={tmp_path / 'second'}"), screen)
    assert screen.said[0].startswith("warm start: from")
    assert not list((tmp_path / "cache").glob("*.partial*"))


def test_truncated_attempts_can_be_left_out_of_the_loss(tmp_path: Path) -> None:
    recipe = micro_recipe(
        tmp_path, "rollout.failures.on_truncation=mask", "rollout.max_turns=2", "steps=1", "sft.updates=30"
    )
    train(recipe)
    seen = 0
    for record in read_step(tmp_path / "run" / "archive" / "step-000001.parquet"):
        weights = iter(record.weights)
        for trajectory in record.group.trajectories:
            for _ in trajectory.turns:
                masked = next(weights).sum() == 0
                assert masked == (trajectory.status != "finished")
                seen += masked
    assert seen


OBJECTIVES = {
    "sequence ratios, scored": [
        "loss.name=gspo",
        "loss.scope=trajectory",
        "loss.anchor=learner",
        "groups_per_update=2",
    ],
    "sequence ratios, sampled": ["loss.name=gspo", "loss.scope=turn", "max_lag=1"],
    "corrected": [
        "loss.name=cispo",
        "loss.anchor=learner",
        "correction.importance_sampling=sequence",
        "groups_per_update=2",
    ],
    "near the start": ["kl.coefficient=0.1", "kl.divergence=k2", "entropy=0.01"],
    "charged": ["credit.name=reinforce_pp", "kl.coefficient=0.1", "kl.apply_to=reward"],
    "with a critic": ["credit.name=gae", "credit.lam=0.9", "critic.optimizer.learning_rate=1e-3"],
    "with a critic, by turn": ["credit.name=gae", "credit.unit=turn", "groups_per_update=2", "loss.anchor=learner"],
    "failures paid": ["rollout.failures.on_failure.name=pay", "rollout.failures.on_failure.value=-1.0"],
}


@pytest.mark.parametrize("overrides", OBJECTIVES.values(), ids=OBJECTIVES)
def test_objectives_train(tmp_path: Path, overrides: list[str]) -> None:
    recipe = micro_recipe(tmp_path, "steps=2", *overrides)
    assert train(recipe) is not None
    for line in untimed(RunFolder.open(recipe.out).metrics)[1:]:
        assert np.isfinite(line["loss"])
        assert line["skipped"] == 0.0
        assert line["ratio"] == pytest.approx(1.0, abs=0.2)


def test_a_reference_is_the_policy_at_the_start_also_after_a_resume(tmp_path: Path) -> None:
    whole = micro_recipe(tmp_path, "kl.coefficient=0.1", "entropy=0.1", f"out={tmp_path / 'whole'}")
    train(whole)
    lines = untimed(RunFolder.open(whole.out).metrics)
    assert lines[1]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert lines[4]["kl"] > 1e-6
    stopped = micro_recipe(tmp_path, "kl.coefficient=0.1", "entropy=0.1", f"out={tmp_path / 'stopped'}")

    async def stop_after_two() -> None:
        stop = asyncio.Event()
        screen = SilentScreen()
        screen.show = lambda done, metrics: stop.set() if done == 2 and "kl" in metrics else None
        assert await run.start(stopped, screen, stop) is None

    asyncio.run(stop_after_two())
    resume(Path(stopped.out))
    assert untimed(RunFolder.open(stopped.out).metrics) == lines


def test_on_policy_distillation_draws_near_the_teacher(tmp_path: Path) -> None:
    teaching = micro_recipe(tmp_path, f"out={tmp_path / 'teacher'}", "sft.updates=60", "steps=1")
    train(teaching)
    teacher = latest_checkpoint(RunFolder.open(teaching.out).checkpoints).path
    taught = [
        "credit.name=distill",
        f"teacher={teacher}",
        "loss.name=reinforce",
        "steps=8",
        "optimizer.learning_rate=3e-3",
    ]
    text = (tmp_path / "micro.toml").read_text().replace('anchor = "engine"\n', "")
    (tmp_path / "distill.toml").write_text(text)
    recipe = load_recipe(tmp_path / "distill.toml", [f"out={tmp_path / 'pupil'}", *taught])
    train(recipe)
    folder = RunFolder.open(recipe.out)

    def credit_of(step: int) -> float:
        records = read_step(folder.archive / f"step-{step:06}.parquet")
        return float(np.mean(np.concatenate([values for record in records for values in record.credit])))

    assert credit_of(1) < -0.5
    assert credit_of(8) > credit_of(1) / 2


def test_an_async_run_that_is_stopped_loses_no_task_and_trains_none_twice(tmp_path: Path) -> None:
    recipe = micro_recipe(tmp_path, "max_lag=2", "steps=6", "checkpoints.every=1")

    async def stop_after(step: int) -> None:
        stop, screen = asyncio.Event(), SilentScreen()
        trained = lambda done, metrics: done == step and "lag/max" in metrics  # not the warm start's
        screen.show = lambda done, metrics: stop.set() if trained(done, metrics) else None
        if step == 2:
            assert await run.start(recipe, screen, stop) is None
        else:
            assert await run.resume(Path(recipe.out), screen, stop) is None

    asyncio.run(stop_after(2))
    asyncio.run(stop_after(4))
    folder = RunFolder.open(recipe.out)
    state = latest_checkpoint(folder.checkpoints).state
    assert state["progress"]["used"] == {"base": 16, "ahead": []}
    assert all(number >= 16 for number in state["waiting"])
    resume(Path(recipe.out))
    tasks = [
        record.group.task.id
        for step in archived_steps(folder.archive)
        for record in read_step(folder.archive / f"step-{step:06}.parquet")
    ]
    assert len(tasks) == len(set(tasks)) == 24  # no epoch has ended
    lines = untimed(folder.metrics)
    assert [line["step"] for line in lines] == list(range(7))
    assert max(line["lag/max"] for line in lines[1:]) <= 2


@pytest.mark.parametrize("stale", ["drop_group", "mask_turn"])
def test_groups_taken_as_they_finish_keep_the_bound_on_lag(tmp_path: Path, stale: str) -> None:
    recipe = micro_recipe(tmp_path, "max_lag=1", "schedule.order=finished", f"schedule.stale={stale}", "steps=5")
    train(recipe)
    for line in untimed(RunFolder.open(recipe.out).metrics)[1:]:
        assert line["lag/max"] <= 1 or (stale == "mask_turn" and line["lag/masked_turns"] > 0)
        assert line["fair/turns"] > 0
