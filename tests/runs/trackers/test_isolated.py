"""A tracker that fails, hangs or is slow costs its reports and a warning, never the loop."""

import errno
import logging
import threading

import pytest

from turnwise.runs.trackers.attempts import SampledAttempt
from turnwise.runs.trackers.isolated import IsolatedTracker, Patience, in_a_line
from turnwise.runs.trackers.library import CannotOpen
from turnwise.runs.trackers.record import TrackerRecord

BRIEF = Patience(open=0.05, close=0.05)
LONG = Patience(open=600, close=600)
ROW = SampledAttempt("t", 0, "finished", 1.0, 1, "text")
NO_ROUTE = RuntimeError("no\nroute")


class Library:
    """A library that notes its calls; those that are named fail, or hang until `release` is set."""

    id, where = "run-1", "here"

    def __init__(self, failing=(), hanging=(), error=NO_ROUTE):
        self.calls, self.failing, self.hanging, self.error = [], failing, hanging, error
        self.release, self.entered = threading.Event(), threading.Event()

    def opened(self):
        self.note("open")
        return self

    def note(self, name, *arguments):
        self.calls.append((name, *arguments))
        self.entered.set()
        if name in self.hanging:
            self.release.wait(600)
        if name in self.failing:
            raise self.error

    def log(self, step, metrics):
        self.note("log", step, dict(metrics))

    def log_attempts(self, step, rows):
        self.note("log_attempts", step, tuple(rows))

    def log_curve(self, step, path):
        self.note("log_curve", step, path)

    def close(self):
        self.note("close")


@pytest.fixture
def record(tmp_path):
    return TrackerRecord(tmp_path / "x.json")


def isolated(library, record, **options):
    return IsolatedTracker("x", library.opened, record, **({"patience": LONG} | options))


def warnings(caplog):
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_reports_arrive_in_order_and_are_remembered(tmp_path, record, caplog):
    library = Library()
    tracker = isolated(library, record)
    tracker.wait_until_open("")
    metrics = {"a": 1.0}
    tracker.log(1, metrics)
    metrics["a"] = 2.0
    tracker.log_attempts(1, [ROW])
    tracker.log_curve(1, tmp_path / "curve.png")
    tracker.close()
    assert library.calls == [
        ("open",),
        ("log", 1, {"a": 1.0}),
        ("log_attempts", 1, (ROW,)),
        ("log_curve", 1, tmp_path / "curve.png"),
        ("close",),
    ]
    kept = TrackerRecord(record.path)
    assert (kept.id, kept.step, kept.curve, tracker.where) == ("run-1", 1, True, "here")
    assert warnings(caplog) == []


def test_a_resume_leaves_out_what_is_there_and_adds_what_is_missing(tmp_path, record):
    record.opened("run-1")
    record.reached(3)
    record.drawn()
    library = Library()
    tracker = isolated(library, record, earlier=[{"step": step, "a": step / 10} for step in range(6)])
    for step in (3, 6):
        tracker.log(step, {"a": step / 10})
        tracker.log_attempts(step, [ROW])
    tracker.log_curve(6, tmp_path / "curve.png")
    tracker.close()
    assert [call[:2] for call in library.calls] == [
        ("open",),
        *(("log", step) for step in (4, 5, 6)),
        ("log_attempts", 6),
        ("close",),
    ]


def test_a_library_that_replaces_gets_steps_again(record):
    record.reached(3)
    library = Library()
    tracker = isolated(library, record, replaces=True)
    tracker.log(3, {})
    tracker.close()
    assert ("log", 3, {}) in library.calls


@pytest.mark.parametrize("error", [RuntimeError("no\nroute"), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["log", "log_attempts", "log_curve"])
def test_an_error_ends_the_reports_with_one_warning(tmp_path, record, caplog, call, error):
    library = Library(failing=[call], error=error)
    tracker = isolated(library, record)
    for step in range(5):
        tracker.log(step, {})
        tracker.log_attempts(step, [ROW])
        tracker.log_curve(step, tmp_path)
    tracker.close()
    [warning] = warnings(caplog)
    assert warning.startswith(f"x failed ({in_a_line(error)}): it gets no more reports")
    assert "\n" not in warning
    assert [name for name, *_ in library.calls].count(call) == 1
    assert library.calls[-1] == ("close",)


def test_an_error_at_the_end_is_a_warning(record, caplog):
    isolated(Library(failing=["close"]), record).close()
    [warning] = warnings(caplog)
    assert warning.startswith("x failed to finish (RuntimeError: no route): it gets no more reports; training goes on")


def test_a_call_that_hangs_is_given_up_after_a_while(record, caplog):
    now, library = [0.0], Library(hanging=["log"])
    tracker = isolated(library, record, clock=lambda: now[0], patience=Patience(open=600, call=30, close=0.05))
    tracker.wait_until_open("")
    library.entered.clear()
    tracker.log(0, {})
    library.entered.wait(600)
    now[0] = 30.0
    tracker.log(1, {})
    assert warnings(caplog) == []
    now[0] = 31.0
    for step in range(2, 500):
        tracker.log(step, {})
    tracker.close()
    [warning] = warnings(caplog)
    assert warning.startswith("x has been busy with one report for more than 30 seconds: it gets no more reports")
    library.release.set()
    tracker._thread.join(600)
    assert library.calls == [("open",), ("log", 0, {}), ("close",)]


def test_reports_that_pile_up_are_given_up(record, caplog):
    library = Library(hanging=["log"])
    tracker = isolated(library, record, patience=Patience(open=600, close=0.05, waiting=3))
    tracker.wait_until_open("")
    library.entered.clear()
    tracker.log(0, {})
    library.entered.wait(600)
    for step in range(1, 4):
        tracker.log(step, {})
    assert warnings(caplog) == []
    for step in range(4, 9):
        tracker.log(step, {})
    [warning] = warnings(caplog)
    assert warning.startswith("x is 3 reports behind: it gets no more reports")
    library.release.set()


@pytest.mark.parametrize("call", ["log", "close"])
def test_closing_waits_for_a_while_only(record, caplog, call):
    library = Library(hanging=[call])
    tracker = isolated(library, record, patience=Patience(open=600, close=0.05))
    tracker.log(0, {})
    tracker.close()
    assert [warning[:40] for warning in warnings(caplog)] == ["x did not finish within 0.05 seconds: it"]
    library.release.set()


def test_a_library_that_does_not_open_is_refused_with_advice(record):
    tracker = isolated(Library(failing=["open"]), record)
    with pytest.raises(ValueError, match=r"^x cannot be opened \(RuntimeError: no route\); do this$"):
        tracker.wait_until_open("do this")
    assert not record.path.exists()


def test_advice_of_the_library_and_failures_of_the_disk_stay_as_they_are(record):
    with pytest.raises(ValueError, match=r"^log in first$") as raised:
        isolated(Library(failing=["open"], error=CannotOpen("log in first")), record).wait_until_open("do this")
    assert type(raised.value) is ValueError, "which the command line shows in a line"
    full = OSError(errno.ENOSPC, "full")
    with pytest.raises(OSError, match="full") as failed:
        isolated(Library(failing=["open"], error=full), record).wait_until_open("do this")
    assert failed.value is full


def test_a_library_that_hangs_while_it_opens_is_refused(record):
    library = Library(hanging=["open"])
    tracker = isolated(library, record, patience=BRIEF)
    with pytest.raises(ValueError, match=r"^x did not open within 0.05 seconds; do this$"):
        tracker.wait_until_open("do this")
    library.release.set()
    tracker._thread.join(600)
    assert library.calls == [("open",), ("close",)]


def test_a_tracker_of_a_run_that_does_not_begin_is_closed_without_a_word(record, caplog):
    library = Library(failing=["close"])
    isolated(library, record).abandon()
    assert library.calls == [("open",), ("close",)]
    assert warnings(caplog) == []


def test_an_error_loses_the_password_of_an_address():
    error = OSError("cannot reach http://user:secret@host/a\nat all " + "x" * 999)
    assert in_a_line(error).startswith("OSError: cannot reach http://***@host/a at all xxx")
    assert len(in_a_line(error)) == 300


def test_a_step_that_is_made_again_is_reported_once(record):
    library = Library()
    tracker = isolated(library, record)
    tracker.wait_until_open("")
    tracker.log(5, {"a": 1.0})
    tracker.log_unfinished(6, {"a": -1.0})
    tracker.close()
    again = isolated(library, record)
    again.wait_until_open("")
    again.log(6, {"a": 2.0})
    again.close()
    assert [call[1:] for call in library.calls if call[0] == "log"] == [(5, {"a": 1.0}), (6, {"a": 2.0})]
