"""turnwise why, and the lines that training prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.logged import recipe_with, run_of
from support.running import micro_toml
from turnwise.cli.commands import main
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import JsonLines


def folder_of(path: Path, **changed: float) -> str:
    folder = RunFolder.create(path, recipe_with().model_dump(mode="json"))
    for line in run_of(4, **changed):
        JsonLines(folder.metrics).log(line.pop("step"), line)
    return str(folder.path)


def test_the_exit_code_says_whether_something_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", folder_of(tmp_path / "sound")]) == 0
    assert capsys.readouterr().out.startswith("nothing found in 4 steps of ")
    assert main(["why", folder_of(tmp_path / "broken", stop_length=0.9)]) == 1
    assert capsys.readouterr().out.startswith("Actions end at the token limit\n  seen   90%")
    assert main(["why", str(tmp_path / "nowhere")]) == 2


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", folder_of(tmp_path / "broken", failure_rate=0.5), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding.keys() == {"name", "cause", "seen", "meaning", "try", "step"}


def test_training_says_a_cause_once_on_the_screen_and_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    small = ["rollout.max_action_tokens=1", "sft.updates=0", "evaluation.every=0"]
    assert main(["train", str(micro_toml(tmp_path)), f"out={run}", *small]) == 0
    line = "step 3: Actions end at the token limit: 100% of the turns"
    assert capsys.readouterr().err.count(f"warning: {line}") == 1
    assert (run / "events.log").read_text().count(line) == 1
