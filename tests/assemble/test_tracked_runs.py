"""Whole runs with trackers on: stopped, resumed, and beside trackers that fail or hang."""

import asyncio
import importlib.util
import json
import logging
import threading
from functools import partial
from pathlib import Path

import pytest

from support.running import SilentScreen, micro_recipe, micro_toml, resume, train, untimed
from support.tracking import PATIENT, installed, offline
from turnwise.assemble import run as assembly
from turnwise.cli.commands import main
from turnwise.runs.folder import RunFolder
from turnwise.runs.trackers import names
from turnwise.runs.trackers.isolated import Patience
from turnwise.runs.trackers.names import TrackerLibrary

__all__ = ["offline"]
REAL = ["tensorboard", "wandb", "mlflow"]
SMALL = ("sft.updates=1", "steps=3", "groups_per_step=2", "rollout.group_size=2", "evaluation.final_tasks=2")


def stop_after(recipe, step):
    """Train until a step has been logged, then stop."""
    stop, screen = asyncio.Event(), SilentScreen()
    screen.show = lambda done, metrics: stop.set() if done == step and "loss" in metrics else None

    async def work():
        return await assembly.start(recipe, screen, stop)

    assert asyncio.run(work()) is None
    return screen


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(assembly, "open_trackers", partial(names.open_trackers, patience=PATIENT))


@pytest.mark.skipif(not all(map(installed, REAL)), reason="needs the extra trackers")
def test_a_run_that_is_stopped_and_resumed_is_one_run_in_each_tracker(tmp_path, offline, patient):
    import mlflow
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped,unused-ignore]

    recipe = micro_recipe(tmp_path, f"trackers={json.dumps(REAL)}", "tracking.project=tests", *SMALL)
    wandb.teardown()
    screen = stop_after(recipe, 1)
    folder = RunFolder.open(recipe.out)
    ids = {name: json.loads((folder.trackers / f"{name}.json").read_text())["id"] for name in REAL}
    assert [line.partition(":")[0] for line in screen.said[:3]] == REAL
    assert resume(folder.path) is not None
    wandb.teardown()
    for name in REAL:
        kept = json.loads((folder.trackers / f"{name}.json").read_text())
        assert kept == {"id": ids[name], "step": 3, "curve": True}
    lines = {line["step"]: line for line in untimed(folder.metrics)}
    assert list(lines) == [0, 1, 2, 3]

    events = EventAccumulator(str(folder.trackers / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.step for event in events.Tensors("attempts/text_summary")] == [1, 2, 3]
    assert [(event.step, event.width) for event in events.Images("curve")] == [(3, 1200)]

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder.trackers / 'mlflow' / 'mlflow.db'}")
    found = {each.step: each.value for each in client.get_metric_history(ids["mlflow"], "loss")}
    assert found == {step: line["loss"] for step, line in lines.items() if step}
    assert client.get_run(ids["mlflow"]).data.params["env.0.name"] == "hops"
    shown = {file.path for file in client.list_artifacts(ids["mlflow"])}
    assert shown == {"recipe.json", "attempts", "curve.png"}
    table = folder.trackers / "mlflow" / "artifacts" / ids["mlflow"] / "artifacts" / "attempts" / "step-000003.json"
    rows = json.loads(table.read_text())["data"]
    assert rows
    assert all(row[0].startswith("hops-") and "[prompt]" in row[-1] for row in rows)

    lives = sorted((folder.trackers / "wandb" / "wandb").glob("offline-run-*"))
    assert len(lives) == 2
    assert all(life.name.endswith(ids["wandb"]) for life in lives)


class Broken:
    """A tracker that fails or hangs in its first report."""

    id, where = "run-1", "here"
    release = threading.Event()

    def __init__(self, run):
        self.hangs = run.project == "hangs"

    def log(self, step, metrics):
        if self.hangs:
            Broken.release.wait(600)
        raise RuntimeError("no route")

    log_attempts = log_curve = log

    def close(self):
        pass


@pytest.fixture
def broken(monkeypatch):
    library = TrackerLibrary(packages=(), extra="", place="tests:Broken", advice="")
    monkeypatch.setattr(names, "LIBRARIES", {"wandb": library})
    monkeypatch.setattr(names, "open_library", lambda library, run: Broken(run))
    brief = Patience(open=600, close=0.05)
    monkeypatch.setattr(assembly, "open_trackers", partial(names.open_trackers, patience=brief))
    Broken.release.clear()
    yield
    Broken.release.set()


@pytest.mark.parametrize(
    ("how", "warning"), [("fails", "wandb failed (RuntimeError: no route)"), ("hangs", "wandb did not finish within")]
)
def test_a_tracker_that_breaks_does_not_touch_the_run(tmp_path, broken, caplog, how, warning):
    plain = micro_recipe(tmp_path, f"out={tmp_path / 'plain'}", *SMALL)
    train(plain)
    tracked = micro_recipe(
        tmp_path, f"out={tmp_path / 'tracked'}", "trackers=['wandb']", f"tracking.project={how}", *SMALL
    )
    assert train(tracked) is not None
    assert untimed(RunFolder(Path(tracked.out)).metrics) == untimed(RunFolder(Path(plain.out)).metrics)
    [said] = [
        entry.getMessage() for entry in caplog.records if "tracker" in entry.name and entry.levelno == logging.WARNING
    ]
    assert said.startswith(warning)


def refused(tmp_path, monkeypatch, capsys, tracker):
    """What a start says that is refused; it must not come to the warm start."""
    monkeypatch.setattr(assembly, "starting_source", None)
    out = tmp_path / "run"
    assert main(["train", str(micro_toml(tmp_path)), f"out={out}", f"trackers=['{tracker}']"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert not out.exists()
    return line


def test_a_missing_library_is_refused_before_the_warm_start(tmp_path, monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trackio" else there(name))
    line = refused(tmp_path, monkeypatch, capsys, "trackio")
    assert line == 'turnwise: tracker trackio needs trackio: pip install "turnwise[trackio]"'


@pytest.mark.skipif(not installed("wandb"), reason="needs the extra trackers")
def test_a_missing_login_is_refused_before_the_warm_start(tmp_path, offline, monkeypatch, capsys):
    import wandb

    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()
    line = refused(tmp_path, monkeypatch, capsys, "wandb")
    assert line.startswith("turnwise: wandb has no API key for api.wandb.ai; run `wandb login`")
    wandb.teardown()
