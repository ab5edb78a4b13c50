import json
import os
import pty
import subprocess
import sys

import pytest

from support.recorded import attempt, record
from turnwise.cli.commands import main
from turnwise.runs.archive import step_path, write_step
from turnwise.runs.evaluations import write_evaluation
from turnwise.runs.folder import RunFolder
from turnwise.types import Status, Trajectory


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has no checkpoint yet."""
    folder = RunFolder.create(tmp_path / "run", {"steps": 3})
    lost = Trajectory((), Status.failed, failure="RuntimeError in step: \x1b[2Jgone")
    write_step(
        folder.archive, 1, [record("a", attempt(0.0), attempt(1.0, 3)), record("b", attempt(0.5), failed=[lost])]
    )
    write_step(folder.archive, 2, [record("c", attempt(0.75), attempt(0.25))])
    write_evaluation(folder.evaluations, 2, "greedy", [record("e", attempt(0.125), kept=False).group], 1.0, str)
    return folder


@pytest.fixture
def show(run, capsys):
    def show(*arguments):
        assert main(["show", str(run.path), *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return show


def keys(lines):
    return [line.split()[0] for line in lines[1:] if line.startswith(("train/", "greedy/")) and ":" not in line]


def test_the_newest_attempts_come_first(show):
    lines = show()
    assert lines[0].split() == "attempt task status reward turns tokens context breaks seconds trained".split()
    assert keys(lines) == ["train/2/0/0", "train/2/0/1", "train/1/0/0", "train/1/0/1", "train/1/1/0", "train/1/1/1"]
    assert show("--limit", "2")[-1] == "4 more; --limit shows them"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--step", "1", "--best"], ["train/1/0/1", "train/1/1/0", "train/1/0/0", "train/1/1/1"]),
        (["--worst"], ["train/2/0/1", "train/2/0/0"]),
        (["--task", "a"], ["train/1/0/0", "train/1/0/1"]),
        (["--evaluation", "greedy"], ["greedy/2/0/0"]),
        (["--evaluation"], []),
        (["--failed"], ["train/1/1/1"]),
    ],
)
def test_which_attempts(show, arguments, expected):
    assert keys(show(*arguments)) == expected


def test_a_failure_is_shown_with_its_reason_and_without_its_escapes(show):
    assert show("--failed")[-1] == "train/1/1/1: RuntimeError in step: ␛[2Jgone"


def test_one_attempt(show):
    assert show("train/1/0/1")[0] == "train/1/0/1  task a of hops, trained on"
    assert show("best")[-1].startswith("── end finished, reward 0.75")
    assert show("worst", "--step", "1")[-1].startswith("── end finished, reward 0")
    tokens = [json.loads(line) for line in show("train/1/0/1", "--tokens", "--json")]
    assert [(token["turn"], token["place"]) for token in tokens] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert {token["credit"] for token in tokens} == {1.0}
    rows = [json.loads(line) for line in show("--json", "--limit", "1")]
    assert (rows[0]["key"], rows[0]["reward"]) == ("train/2/0/0", 0.75)


def test_mistakes_are_one_line(run, capsys):
    for arguments, reason in (
        (["train/9/0/0"], "no attempts of step 9"),
        (["nonsense"], "names no attempt"),
        (["best", "--evaluation", "sampled"], "no such attempts yet"),
        (["--limit", "0"], "at least one row"),
        (["best", "--worst"], "--worst is ignored"),
        (["train/1/0/0", "--step", "7"], "--step is ignored"),
        (["train/1/0/0", "--failed"], "--failed is ignored"),
        (["--tokens"], "--tokens is ignored: it is about one ATTEMPT"),
    ):
        assert main(["show", str(run.path), *arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert reason in line
    step_path(run.archive, 1).write_bytes(b"half")
    assert main(["show", str(run.path)]) == 0
    out, err = capsys.readouterr()
    assert keys(out.splitlines()) == ["train/2/0/0", "train/2/0/1"]
    assert err.startswith("warning: ")
    assert "step-000001.parquet" in err


def program(run, *arguments):
    return [sys.executable, "-m", "turnwise.cli", "show", str(run.path), *arguments]


def test_a_terminal_gets_colours_and_a_pipe_none(run):
    arguments = program(run, "train/1/0/1", "--tokens")
    plain = subprocess.run(arguments, capture_output=True, timeout=120).stdout
    assert b"\x1b" not in plain
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "wb") as terminal:
        subprocess.run(
            arguments, stdout=terminal, env={**os.environ, "TERM": "xterm-256color"}, timeout=120, check=True
        )
    assert b"\x1b[" in os.read(ours, 100_000)
    os.close(ours)


def test_a_reader_that_has_read_enough_gets_no_traceback(run):
    process = subprocess.Popen(program(run), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(120) == 0
