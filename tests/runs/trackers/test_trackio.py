"""trackio: a store of the real library on this machine, read by its interface. `make test-trackio` runs this file in an
environment that has it; elsewhere it is skipped."""

import importlib.util
import json
import os
import tempfile

import pytest

from support.tracking import RECIPE, ROWS, first_life, metrics_of, offline, opened, second_life
from turnwise.runs.trackers.attempts import cells

if importlib.util.find_spec("trackio") is None:
    pytest.skip("trackio is not installed", allow_module_level=True)
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp()  # which it reads when it is imported
import trackio
from trackio.sqlite_storage import SQLiteStorage

__all__ = ["offline"]


def test_a_resume_continues_the_run_without_the_steps_that_it_has(offline):
    first_life(offline, ["trackio"])
    second_life(offline, ["trackio"])
    kept = json.loads((offline.trackers / "trackio.json").read_text())
    [run] = trackio.Api().runs("turnwise-tests")
    assert run.name == kept["id"]
    assert run.name.startswith("quickstart-")
    assert {name: value for name, value in run.config.items() if not name.startswith("_")} == RECIPE
    rows = SQLiteStorage.get_logs("turnwise-tests", run.name)
    for name in ("reward/mean", "eval/sampled/pass@4"):
        found = [(row["step"], row[name]) for row in rows if name in row]
        assert found == [(step, metrics_of(step, 2 if step == 4 else 1)[name]) for step in range(5)]
    tables = [(row["step"], row["attempts"]["_value"]) for row in rows if "attempts" in row]
    assert [(step, [list(row.values()) for row in table]) for step, table in tables] == [
        (1, cells(ROWS)),
        (4, cells(ROWS[:1])),
    ]
    [curve] = [row["curve"] for row in rows if "curve" in row]
    assert os.path.isfile(os.path.join(os.environ["TRACKIO_DIR"], "media", curve["file_path"]))


def test_a_run_that_is_gone_is_refused_in_a_line(offline):
    offline.trackers.mkdir(parents=True)
    (offline.trackers / "trackio.json").write_text('{"id": "gone", "step": 3, "curve": false}')
    with pytest.raises(ValueError, match=r"^trackio cannot be opened \(ValueError: Run 'gone' does not exist"):
        opened(offline, ["trackio"], 3)
