import time

import pytest

from support.viewing import make_run
from turnwise.view import watched_run
from turnwise.view.watched_run import WatchedRuns


def test_runs_have_short_names_that_differ(tmp_path):
    places = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c" / "my run<>"]
    for place in places:
        make_run(place, steps=1)
    runs = WatchedRuns.open([*places, tmp_path / "a" / ".." / "a" / "run"])
    assert [run.name for run in runs] == ["run", "run-2", "my-run"]
    assert runs["run-2"].reader.folder.path == places[1]
    with pytest.raises(ValueError, match="no run 'x' here; there are run, run-2, my-run"):
        runs["x"]


def test_a_folder_that_is_none_of_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        WatchedRuns.open([tmp_path])
    with pytest.raises(ValueError, match="at least one"):
        WatchedRuns.open([])


def test_a_large_run_is_read_in_parts(tmp_path, monkeypatch):
    make_run(tmp_path / "run", steps=7)
    monkeypatch.setattr(watched_run, "FILES_AT_ONCE", 3)
    run = WatchedRuns.open([tmp_path / "run"])["run"]
    assert [run.refresh(), run.version, len(run.reader.attempts)] == [True, 1, 3 + 6 + 6]
    assert [run.refresh(), run.version] == [True, 2]
    assert [run.refresh(), len(run.reader.attempts)] == [False, 3 + 42]
    version = run.version
    assert not run.refresh()
    assert run.version == version


def test_a_thread_reads_on_while_somebody_looks(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", steps=3, finished=False)
    monkeypatch.setattr(watched_run, "SECONDS_BETWEEN", 0.01)
    with WatchedRuns.open([tmp_path / "run"]) as runs:
        run, version = runs["run"], runs.version
        folder.summary.write_text('{"done": 1}')
        while runs.version == version:  # the test's timeout ends this
            runs.looked_at.set()
            time.sleep(0.01)
        assert run.finished
    assert not runs.thread.is_alive()


def test_a_run_that_cannot_be_read_does_not_end_the_others(tmp_path, monkeypatch):
    make_run(tmp_path / "run", steps=1)
    run = WatchedRuns.open([tmp_path / "run"])["run"]
    monkeypatch.setattr(run.reader, "refresh", lambda limit: 1 / 0)
    assert not run.refresh()
    assert run.trouble.startswith("ZeroDivisionError")
