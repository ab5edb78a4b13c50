"""The whole report: of a whole run, a live one, an empty one, a broken one and a hostile one."""

import json

import pytest

from support.making import make_turn
from support.recorded import attempt, record
from support.reported import check_page, recorded_run
from support.running import micro_recipe, train
from turnwise import __version__
from turnwise.inspect.report.page import p_words, report
from turnwise.inspect.run_reader import RunReader
from turnwise.messages import Message
from turnwise.runs.archive import step_path, write_step
from turnwise.runs.folder import RunFolder
from turnwise.runs.machine import read_machines, record_machine
from turnwise.types import Status, Trajectory

AFTER = {"e": [1.0], "f": [1.0], "g": [1.0], "h": [0.0]}
SECTIONS = ["curves", "how-attempts-ended", "attempts", "cost", "recipe", "machine-and-versions", "events"]
EVIL = "<script>alert(1)</script><img src=//evil.example/x onerror=alert(1)>"


def test_a_whole_run(tmp_path):
    run = recorded_run(tmp_path / "run", AFTER)
    run.folder.summary.write_text(json.dumps({"updates": 2, "seconds": {"train": 7200.0}}))
    record_machine(run.folder.machine, 0, [])
    seen = check_page(report(run))
    assert [value for name, value in seen.attributes if name == "id"] == SECTIONS
    assert "25.0% → 75.0%" in seen.text
    assert "before training: 4.6% to 69.9%, 4 attempts at 4 tasks" in seen.text
    assert "after step 2: 30.1% to 95.4%, 4 attempts at 4 tasks" in seen.text
    assert "change +50.0 points" in seen.text
    assert "p = 0.5; paired over 4 tasks: 2 better, 0 worse" in seen.text
    assert "2 updates" in seen.text
    assert "2 h 0 min" in seen.text
    assert "The run is over." in seen.text


def test_what_is_missing_is_said(tmp_path):
    run = recorded_run(tmp_path / "run", AFTER)
    missing = check_page(report(run)).text
    assert "machine.json is not there" in missing
    assert "no checkpoint has a tokenizer" in missing
    assert "Not over yet: step 2 of 2 is logged." in missing
    assert "metrics.jsonl" not in missing


def test_a_run_that_has_only_begun(tmp_path):
    seen = check_page(report(RunReader(RunFolder.create(tmp_path / "run", {"steps": 9, "env": [{"name": "hops"}]}))))
    assert [value for name, value in seen.attributes if name == "id"] == SECTIONS
    assert "metrics.jsonl is not there" in seen.text
    assert "there are no attempts" in seen.text
    assert "Not over yet: step 0 of 9 is logged." in seen.text


def test_a_report_follows_a_run_that_goes_on(tmp_path):
    run = recorded_run(tmp_path / "run")
    assert "0 better" not in check_page(report(run)).text
    with run.folder.metrics.open("a") as file:
        file.write('{"step": 3, "success": 1.0}\n{"step": 4, "succ')
    assert "step 3 of 2 is logged" in check_page(report(run)).text


def test_half_written_files(tmp_path):
    run = recorded_run(tmp_path / "run", AFTER)
    path = step_path(run.folder.archive, 2)
    path.write_bytes(path.read_bytes()[:200])
    (run.folder.evaluations / "step-000002-sampled.parquet").write_bytes(b"PAR1")
    run.folder.config.write_bytes(run.folder.config.read_bytes()[:20])
    run.folder.summary.write_text('{"before": ')
    run.folder.machine.write_text("[{")
    with run.folder.metrics.open("ab") as file:
        file.write(b"\xff\xfe\n[]\n{}\n" + b'{"step": 3, "success": ')
    text = check_page(report(run)).text
    assert "config.json cannot be read" in text
    assert "3 lines are no JSON objects" in text
    assert "summary.json cannot be read" in text
    assert "machine.json is not there or cannot be read" in text
    assert str(path) in text
    assert "25.0% → 75.0%" in text


@pytest.mark.parametrize("size", [0, 200_000])
def test_nothing_that_a_run_recorded_becomes_markup(tmp_path, size):
    config = {"steps": 2, "env": [{"name": EVIL, "dataset": EVIL + "x" * size}], EVIL: {EVIL: [EVIL, {EVIL: EVIL}]}}
    run = recorded_run(tmp_path / "<script>run", {EVIL + "x" * size: [1.0], "f": [0.0]}, config)
    message = Message("user", EVIL)
    one = Trajectory((make_turn([1], [2], said=message, heard=(message,)),), Status.failed, failure=EVIL + "\x1b\ud800")
    write_step(run.folder.archive, 2, [record(EVIL, attempt(1.0), failed=[one], dataset=EVIL)])
    run.folder.events.write_text(EVIL)
    with run.folder.metrics.open("a") as file:
        file.write(
            json.dumps(
                {
                    "step": 2,
                    f"status/{EVIL}": 3.0,
                    "status/failed": 10**400,
                    f"seconds/exam/{EVIL}": 1.0,
                    "success": 10**400,
                }
            )
            + "\n"
        )
        file.write(json.dumps({"step": 10**400, "success": 0.5}) + "\n")
        file.write(json.dumps({"step": -(10**6), "entropy": 1e299, "reward/mean": -1e299}) + "\n")
    run.folder.machine.write_text(json.dumps([{"step": 0, "turnwise": EVIL, "cpu": [EVIL], "commit": {EVIL: EVIL}}]))
    seen = check_page(report(run))
    assert "<script>alert(1)</script>" in seen.text
    assert len(seen.text) < 500_000


@pytest.mark.parametrize(("p_value", "words"), [(1.0, "= 1"), (0.0312, "= 0.031"), (1e-9, "< 0.0001")])
def test_p_values(p_value, words):
    assert p_words(p_value) == words


def test_a_run_that_was_trained_lacks_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    train(micro_recipe(tmp_path, "steps=2"))
    seen = check_page(report(RunReader.open(tmp_path / "run")))
    assert "Missing or unreadable" not in seen.text
    assert "The run is over." in seen.text
    assert "2 updates" in seen.text
    assert "paired over 16 tasks" in seen.text
    assert "Follow the links." in seen.text  # a prompt, by the tokenizer of a checkpoint
    [entry] = read_machines(tmp_path / "run" / "machine.json")
    assert (entry["step"], entry["turnwise"]) == (0, __version__)
