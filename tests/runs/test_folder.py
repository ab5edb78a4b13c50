import json
from pathlib import Path

import pytest

from turnwise.runs.folder import RunFolder


def one_line(error):
    return "\n" not in str(error.value)


def test_places():
    folder = RunFolder(Path("runs/hops-0"))
    places = [
        folder.config,
        folder.metrics,
        folder.events,
        folder.archive,
        folder.evaluations,
        folder.checkpoints,
        folder.summary,
        folder.curve,
    ]
    assert [str(place.relative_to("runs/hops-0")) for place in places] == [
        "config.json",
        "metrics.jsonl",
        "events.log",
        "archive",
        "evaluations",
        "checkpoints",
        "summary.json",
        "curve.png",
    ]


@pytest.mark.parametrize("kind", [str, Path])
def test_create_and_open(tmp_path, kind):
    path = tmp_path / "runs" / "hops-0"
    created = RunFolder.create(kind(path), {"seed": 0, "note": "ü"})
    assert RunFolder.open(kind(path)) == created == RunFolder(path)
    assert json.loads(created.config.read_text()) == {"seed": 0, "note": "ü"}


def test_an_empty_folder_may_become_a_run(tmp_path):
    assert RunFolder.create(tmp_path, {}).config.exists()


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    RunFolder.create(tmp_path, {"seed": 0})
    with pytest.raises(ValueError) as error:
        RunFolder.create(tmp_path, {"seed": 1})
    assert str(error.value) == (
        f'{tmp_path} exists already; resume it with "turnwise train --resume {tmp_path}" '
        "or choose another folder with out=..."
    )
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 0}


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_way(tmp_path, below):
    (tmp_path / "run").write_text("x")
    with pytest.raises(ValueError, match=r"a file is in the way; move it or choose another folder with out=") as error:
        RunFolder.create(tmp_path / "run" / below, {})
    assert one_line(error)


@pytest.mark.parametrize("stage", ["mkdir", "iterdir"])
def test_an_unwritable_place(tmp_path, monkeypatch, stage):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, stage, refuse)
    with pytest.raises(ValueError, match=r"cannot write to .*run \(Permission denied\); make it writable or") as error:
        RunFolder.create(tmp_path / "run", {})
    assert one_line(error)


def test_open_needs_a_config(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="it has no config.json") as error:
            RunFolder.open(path)
        assert one_line(error)
