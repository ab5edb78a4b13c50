import importlib
import importlib.util
import sys
import threading
from typing import get_args

import pytest

from turnwise.recipe.schema import Recipe
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import JsonLines
from turnwise.runs.trackers import names
from turnwise.runs.trackers.isolated import Patience
from turnwise.runs.trackers.names import LIBRARIES, check_installed, open_trackers


def test_a_recipe_may_name_each_of_them():
    [choice, _] = get_args(Recipe.model_fields["trackers"].annotation)
    assert set(get_args(choice)) == set(LIBRARIES)
    for library in LIBRARIES.values():
        module, _, name = library.place.partition(":")
        assert hasattr(importlib.import_module(module), name), "our modules import the libraries late"


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_named_with_its_extra(name, monkeypatch):
    for package in LIBRARIES[name].packages:
        there = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda asked, gone=package, there=there: None if asked == gone else there(asked),
        )
        break
    expected = rf'^tracker {name} needs {package}: pip install "turnwise\[{LIBRARIES[name].extra}\]"$'
    with pytest.raises(ValueError, match=expected):
        check_installed([name])


class Opened:
    """A library that is opened with a run."""

    id, where = "run-1", "here"
    runs: list = []  # noqa: RUF012
    closed: list = []  # noqa: RUF012

    def __init__(self, run):
        Opened.runs.append(run)

    def log(self, step, metrics):
        pass

    log_attempts = log_curve = log

    def close(self):
        Opened.closed.append(threading.current_thread().name)


class Refuses(Opened):
    def __init__(self, run):
        raise RuntimeError("offline")


@pytest.fixture
def libraries(monkeypatch):
    Opened.runs, Opened.closed = [], []
    here = f"{__name__}:"
    made = {
        "tensorboard": names.TrackerLibrary(packages=(), extra="", place=here + "Opened", advice="", replaces=True),
        "wandb": names.TrackerLibrary(packages=(), extra="", place=here + "Opened", advice=""),
        "mlflow": names.TrackerLibrary(packages=(), extra="", place=here + "Refuses", advice="do this"),
    }
    monkeypatch.setattr(names, "LIBRARIES", made)
    monkeypatch.setattr(names, "import_module", lambda module: sys.modules[module])


def opened(folder, *chosen, after=-1):
    return open_trackers(chosen, {"steps": 4}, "project", folder, after, Patience(open=600, close=600))


def test_a_run_is_opened_anew_and_then_continued(tmp_path, libraries):
    folder = RunFolder(tmp_path / "quickstart")
    folder.path.mkdir()
    for tracker in opened(folder, "wandb", "wandb"):
        tracker.log(5, {})
        tracker.close()
    for tracker in opened(folder, "wandb", "tensorboard", after=3):
        tracker.close()
    assert [(run.name, run.project, run.id, run.after) for run in Opened.runs[:1]] == [
        ("quickstart", "project", "", -1)
    ]
    again = {run.folder.name: run for run in Opened.runs[1:]}
    assert (again["wandb"].id, again["tensorboard"].id) == ("run-1", "")
    assert all(run.after == 3 and run.recipe == {"steps": 4} for run in again.values())


def test_none_is_named(tmp_path):
    assert open_trackers([], {}, "project", RunFolder(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_replaces_starts_from_the_checkpoint(tmp_path, libraries):
    """Otherwise steps that it failed to replace would never be added."""
    folder = RunFolder(tmp_path)
    for tracker in opened(folder, "tensorboard"):
        tracker.log(5, {})
        tracker.close()
    for step in range(3):
        JsonLines(folder.metrics).log(step, {})
    [tracker] = opened(folder, "tensorboard", after=2)
    assert tracker._record.step == 2
    tracker.close()


def test_one_that_does_not_open_closes_the_others(tmp_path, libraries):
    with pytest.raises(ValueError, match=r"^mlflow cannot be opened \(RuntimeError: offline\); do this$"):
        opened(RunFolder(tmp_path), "wandb", "mlflow")
    assert Opened.closed == ["tracker wandb"]
