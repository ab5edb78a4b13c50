"""Attempts as conversations: which, and how much of them."""

import numpy as np
import pytest

from support.making import make_turn
from support.recorded import attempt, record
from support.reported import check_page, recorded_run
from turnwise.inspect.report.conversation import attempts_shown
from turnwise.inspect.report.markup import document
from turnwise.inspect.run_reader import RunReader
from turnwise.messages import Message, ToolCall
from turnwise.runs.archive import Record, write_step
from turnwise.runs.folder import RunFolder
from turnwise.types import Group, Status, Task, Trajectory

LARGE = 10_000_000


def shown(run):
    run.refresh()
    page = document("page", attempts_shown(run))
    return check_page(page).text, page


def test_the_newest_evaluation_is_shown(tmp_path):
    text, _ = shown(recorded_run(tmp_path / "run", {"e": [1.0], "f": [0.25], "g": [0.5]}))
    assert "Of the 3 attempts in the sampled evaluation of the weights after step 2" in text
    most, least = text.split("Paid least")
    assert most.index("reward 1 ·") < most.index("reward 0.5 ·") < most.index("reward 0.25 ·")
    assert least.index("reward 0.25 ·") < least.index("reward 0.5 ·")


def test_before_training_that_is_said(tmp_path):
    assert "in the sampled evaluation before training" in shown(recorded_run(tmp_path / "run"))[0]


def test_a_training_step_stands_in_before_there_is_an_evaluation(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    lost = Trajectory((), Status.failed, failure="RuntimeError: \x1b[2Jgone <b>")
    write_step(folder.archive, 3, [record("a", attempt(1.0), attempt(1.0), failed=[lost])])
    text, _ = shown(RunReader(folder))
    assert "Of the 3 attempts in training step 3" in text
    assert "Failed (the newest of 1 in training and evaluations)" in text
    assert "RuntimeError: ␛[2Jgone <b>" in text


def test_equal_attempts_have_no_worst(tmp_path):
    text, _ = shown(recorded_run(tmp_path / "run", {"e": [1.0], "f": [1.0]}))
    assert "All of them were paid 1" in text
    assert "Paid least" not in text


def test_no_attempts(tmp_path):
    assert shown(RunReader(RunFolder.create(tmp_path / "run", {})))[0].endswith("No attempts are recorded yet.\n")


def hostile(size):
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)> https://evil.example \x1b[31m \ud800 \u202e"
    said = Message("assistant", evil + "x" * size, calls=(ToolCall(evil, {"a": evil}),) * 40, thinking=evil, fault=evil)
    return evil, said


@pytest.mark.parametrize("size", [0, LARGE])
def test_hostile_and_huge_texts_are_escaped_and_cut(tmp_path, size):
    evil, said = hostile(size)
    heard = (Message("user", evil + "y" * size), Message(evil, evil)) * 20
    turns = tuple(make_turn([1, 2], [3], said=said, heard=heard) for _ in range(60 if not size else 1))
    one = Trajectory(turns, Status.finished, 1.0, marks={evil: 1.0})
    group = Group(Task(evil + "z" * (size // 10), evil), (one,), (Trajectory((), Status.failed, failure=evil),))
    folder = RunFolder.create(tmp_path / "run", {})
    write_step(folder.archive, 1, [as_record(group)])
    text, page = shown(RunReader(folder))
    assert "<script>alert(1)</script>" in text  # as text
    assert "\\ud800" in text
    assert "␛[31m" in text
    assert len(page) < 3_000_000
    if size:
        assert f"{size - 3000 + len(evil):,} characters more" in text
    else:
        assert "… 36 turns more …" in text
        assert "… 24 messages more …" in text
        assert "… 24 calls more …" in text


def as_record(group):
    ones = tuple(np.ones(len(turn.action), np.float32) for one in group.trajectories for turn in one.turns)
    return Record(group, True, ones, ones)


def test_an_attempt_that_cannot_be_read_is_a_note(tmp_path, monkeypatch):
    run = recorded_run(tmp_path / "run", {"e": [1.0], "f": [0.0]})
    run.refresh()

    def gone(key):
        raise ValueError("the file is <gone>")

    monkeypatch.setattr(run, "attempt", gone)
    assert shown(run)[0].count("This attempt cannot be read: the file is <gone>") == 4


def test_prompts_are_cut_by_tokens(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    one = Trajectory((make_turn(np.arange(5000), [3]),), Status.finished, 1.0)
    write_step(folder.archive, 1, [as_record(Group(Task("a", "b"), (one,)))])
    text, _ = shown(RunReader(folder))
    assert "prompt: 5,000 tokens" in text
    assert "… 3,500 tokens more" in text
    assert "4999" not in text
