"""Whole runs of a mixture with router replay: recorded, archived, replayed, measured."""

from __future__ import annotations

import pytest

from support.mixture import mixture_folder
from support.running import micro_recipe, resume, train, untimed
from turnwise.assemble.checks import check
from turnwise.runs.archive import read_step, step_path
from turnwise.runs.folder import RunFolder
from turnwise.types import turns_of

FEW = ("steps=2", "sft.updates=0", "evaluation.every=0", "groups_per_step=2", "model.hidden=", "model.layers=")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return mixture_folder(tmp_path_factory.mktemp("mixture"))


def replaying(tmp_path, mixture, *overrides):
    return micro_recipe(tmp_path, *FEW, f"model.path={mixture}", "model.router_replay=true", *overrides)


def test_a_run_replays_what_its_engine_took(tmp_path, mixture):
    train(replaying(tmp_path, mixture))
    lines = [line for line in untimed(tmp_path / "run" / "metrics.jsonl") if line["step"]]
    assert all(0.9 < line["routes/replayed"] <= 1.0 for line in lines)
    assert [line["routes/disagreed"] for line in lines] == [0.0, 0.0], "one version of weights sampled each step"
    assert max(line["gap/max"] for line in lines) < 1e-4
    archive = RunFolder.open(tmp_path / "run").archive
    for step in (1, 2):
        turns = list(turns_of([record.group for record in read_step(step_path(archive, step))]))
        assert turns
        assert all(turn.routes is not None and turn.routes.shape[1:] == (2, 2) for turn in turns)


def test_a_run_with_lag_and_a_resume(tmp_path, mixture):
    """Groups that wait in a checkpoint keep their routes."""
    train(replaying(tmp_path, mixture, "steps=3", "max_lag=1", "checkpoints.every=1"))
    folder = tmp_path / "run"
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"steps": 3', '"steps": 5'))
    (folder / "SHA256SUMS").unlink()  # as one does who changes it on purpose
    resume(folder)
    lines = [line for line in untimed(folder / "metrics.jsonl") if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["routes/replayed"] > 0.9 for line in lines)


def test_without_the_key_nothing_is_recorded(tmp_path, mixture):
    train(micro_recipe(tmp_path, *FEW, f"model.path={mixture}"))
    lines = untimed(tmp_path / "run" / "metrics.jsonl")
    assert not any("routes/replayed" in line for line in lines)


def test_a_model_without_routers_is_refused_before_anything_is_sampled(tmp_path):
    recipe = micro_recipe(tmp_path, "model.router_replay=true")
    check(recipe)
    with pytest.raises(ValueError, match="has no routers"):
        train(recipe)
