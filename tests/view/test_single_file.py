import json
import re

import pytest

from support.viewing import HOSTILE, make_hostile_run, make_run
from turnwise.cli.commands import main
from turnwise.inspect.attempts import AttemptKey
from turnwise.view import single_file
from turnwise.view.single_file import attempt_file, bundle, step_file, step_of
from turnwise.view.watched_run import WatchedRuns


def opened(path):
    runs = WatchedRuns.open([path])
    runs.read_all()
    return runs, next(iter(runs))


def answers_of(text):
    (found,) = re.findall(r'<script type="application/json" id="answers" data-start="([^"]*)">([^<]*)</script>', text)
    return found[0], json.loads(found[1])


def test_an_attempt_has_all_that_the_page_asks(tmp_path):
    make_run(tmp_path / "run")
    runs, run = opened(tmp_path / "run")
    start, answers = answers_of(attempt_file(runs, run, AttemptKey("train", 2, 1, 0)))
    assert start == "#/attempt/run/train/2/1/0"
    assert set(answers) == {
        "/api/runs",
        "/api/run/attempt/train/2/1/0",
        "/api/run/tokens/train/2/1/0?turn=0&from=0",
        "/api/run/tree/train/2/1",
    }
    assert str(tmp_path) not in json.dumps(answers)


def test_a_step_has_its_attempts_as_far_as_they_fit(tmp_path, monkeypatch):
    make_run(tmp_path / "run")
    runs, run = opened(tmp_path / "run")
    text, whole, total = step_file(runs, run, "train", 2)
    assert (whole, total) == (6, 6)
    assert len(answers_of(text)[1]["/api/run/attempts"]["rows"]) == 6
    monkeypatch.setattr(single_file, "MOST_BYTES", 6000)
    text, whole, total = step_file(runs, run, "train", 2)
    assert 0 < whole < total
    assert len(answers_of(text)[1]) == 2 + 2 * whole
    with pytest.raises(ValueError, match="no attempts of step 9"):
        step_file(runs, run, "train", 9)


def test_what_was_recorded_cannot_leave_its_element(tmp_path):
    make_hostile_run(tmp_path / "run")
    runs, run = opened(tmp_path / "run")
    text = attempt_file(runs, run, AttemptKey("train", 1, 0, 0))
    assert answers_of(text)[1]["/api/run/attempt/train/1/0/0"]["turns"][0]["said"]["content"]["text"] == HOSTILE
    assert len(re.findall(r"<script", text)) == 2
    assert "<img" not in text
    assert "script-src 'sha256-" in text
    text.encode("utf-8")


def test_every_module_is_in_the_script_once():
    script = bundle()
    assert script.count("const module_main_js") == 1
    without_comments = re.sub(r"/\*.*?\*/", "", script, flags=re.DOTALL)
    assert not re.search(r"^(import|export) ", without_comments, re.MULTILINE)


def test_steps_are_named():
    assert step_of("12") == ("train", 12)
    assert step_of("greedy/50") == ("greedy", 50)
    for text in ("", "x", "greedy/", "-1"):
        with pytest.raises(ValueError, match="--step"):
            step_of(text)


def test_the_command_writes_a_file(tmp_path, capsys):
    make_run(tmp_path / "run")
    out = tmp_path / "a.html"
    assert main(["view", str(tmp_path / "run"), "--html", str(out), "--attempt", "greedy/3/0/1"]) == 0
    assert "a.html: 0." in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")
    assert main(["view", str(tmp_path / "run"), "--html", str(out), "--step", "greedy/3"]) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--html", "x.html"], "either --attempt KEY or --step N"),
        (["--html", "x.html", "--attempt", "a", "--step", "1"], "either --attempt KEY or --step N"),
        (["--attempt", "train/1/0/0"], "go with --html"),
        (["--html", "x.html", "--attempt", "nothing"], "names no attempt"),
        (["--html", "no/such/folder/x.html", "--attempt", "train/1/0/0"], "cannot write"),
        (["--port", "99999"], "ports are 0 to 65535"),
    ],
)
def test_mistakes_on_the_command_line_are_said(tmp_path, monkeypatch, capsys, arguments, reason):
    make_run(tmp_path / "run", steps=1)
    monkeypatch.chdir(tmp_path)
    assert main(["view", "run", *arguments]) == 2
    assert reason in capsys.readouterr().err
