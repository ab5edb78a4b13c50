"""Weights & Biases: offline runs of the real library, read from its files."""

import json

import pytest

from support.tracking import RECIPE, ROWS, first_life, metrics_of, offline, opened, second_life
from turnwise.runs.trackers import wandb as ours
from turnwise.runs.trackers.attempts import COLUMNS, cells
from turnwise.runs.trackers.library import CannotOpen

wandb = pytest.importorskip("wandb")
__all__ = ["offline"]


@pytest.fixture(autouse=True)
def fresh():
    """W&B reads its settings once per process."""
    wandb.teardown()
    yield
    wandb.teardown()


def records(folder):
    """What each life wrote: (kind, record), in order."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for path in sorted(
        (folder.trackers / "wandb").glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime
    ):
        store, found = DataStore(), []
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            found.append((record.WhichOneof("record_type"), record))
        yield path.parent, found


def values(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def history(found):
    return {record.history.step.num: values(record.history.item) for kind, record in found if kind == "history"}


def test_a_resume_continues_the_run_without_the_steps_that_it_has(offline):
    first_life(offline, ["wandb"])
    second_life(offline, ["wandb"])
    wandb.teardown()  # which waits until its process has written all
    (one, first), (other, second) = records(offline)
    runs = [record.run for found in (first, second) for kind, record in found if kind == "run"]
    kept = json.loads((offline.trackers / "wandb.json").read_text())
    assert {run.run_id for run in runs} == {kept["id"]}
    assert {(run.project, run.display_name) for run in runs} == {("turnwise-tests", "quickstart")}
    for run in runs:
        assert {key: value for key, value in values(run.config.update).items() if key != "_wandb"} == RECIPE
    for found, life, steps in ((first, 1, [0, 1, 2, 3]), (second, 2, [4])):
        assert list(history(found)) == steps
        for step, row in history(found).items():
            assert {name: row[name] for name in metrics_of(step, life)} == metrics_of(step, life)
    for folder, row, rows in ((one, history(first)[1], ROWS), (other, history(second)[4], ROWS[:1])):
        table = json.loads((folder / "files" / row["attempts/path"]).read_text())
        assert (table["columns"], table["data"]) == (list(COLUMNS), cells(rows))
    curve = history(second)[4]
    assert (curve["curve/width"], curve["curve/height"]) == (3, 2)
    assert (other / "files" / curve["curve/path"]).is_file()


def test_without_a_key_it_is_refused_in_a_line_and_nobody_is_asked(offline, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    offline.path.mkdir()
    with pytest.raises(ValueError, match=r"^wandb has no API key for api.wandb.ai; run `wandb login`.*=offline$"):
        opened(offline, ["wandb"])
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "a" * 40 + "\n")
    ours.check_login("https://api.wandb.ai")
    with pytest.raises(CannotOpen, match="wandb.example"):
        ours.check_login("https://wandb.example")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    ours.check_login("https://wandb.example")


def test_a_server_that_does_not_answer_is_refused_in_a_line(offline, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(ours, "OPEN_SECONDS", 2)
    offline.path.mkdir()
    with pytest.raises(
        ValueError, match=r"^wandb cannot be opened \(.*; check the network.*WANDB_MODE=offline$"
    ) as refused:
        opened(offline, ["wandb"])
    assert "\n" not in str(refused.value)
