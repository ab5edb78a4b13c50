"""What `turnwise why` says of run folders: broken runs, and folders that are not whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from support.logged import recipe_with, run_of
from support.running import micro_recipe, train
from turnwise.inspect.why import LOOK_BACK, diagnose, replay
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import JsonLines, read_metrics
from turnwise.schedule.stopping import RunStopped


def folder_of(path: Path, steps: int = 4, **changed: float) -> RunFolder:
    """The folder of a run with made-up metrics."""
    folder = RunFolder.create(path / "run", recipe_with().model_dump(mode="json"))
    tracker = JsonLines(folder.metrics)
    for line in run_of(steps, **changed):
        tracker.log(line.pop("step"), line)
    return folder


def test_a_cause_with_what_was_seen_and_what_to_try(tmp_path: Path) -> None:
    diagnosis = diagnose(folder_of(tmp_path, stop_length=0.9).path)
    assert [finding.name for finding in diagnosis.findings] == ["token_limit"]
    assert diagnosis.describe() == [
        "Actions end at the token limit",
        "  seen   90% of the turns of the last 3 steps were cut off at rollout.max_action_tokens = 512.",
        "  means  The environment hears unfinished messages, and credit goes to beginnings.",
        "  try    Raise rollout.max_action_tokens and, with it, rollout.max_trajectory_tokens.",
    ]
    assert json.loads(json.dumps(diagnosis.to_json()))["findings"][0]["step"] == 4


def test_a_sound_run_has_no_findings(tmp_path: Path) -> None:
    diagnosis = diagnose(folder_of(tmp_path, steps=1).path)
    assert diagnosis.findings == ()
    assert diagnosis.describe() == [f"nothing found in 1 step of {tmp_path / 'run'}"]


def test_a_run_that_has_logged_nothing_yet(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", recipe_with().model_dump(mode="json"))
    assert diagnose(folder.path).findings == ()
    folder.metrics.write_bytes(b'{"step": 0, "eval/sam')
    assert diagnose(folder.path).findings == ()


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, stop_length=0.9)
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 5, "groups/kept": 8.0, "stop/len')
    assert [finding.name for finding in diagnose(folder.path).findings] == ["token_limit"]


def test_metrics_that_are_not_numbers_find_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    lines = [json.dumps({"step": step, "groups/kept": "x", "stop/length": [1], "ratio": None}) for step in range(5, 9)]
    with folder.metrics.open("a") as file:
        file.write("\n".join(lines) + "\n")
    assert diagnose(folder.path).findings == ()


def test_metrics_that_are_nan_find_nothing(tmp_path: Path) -> None:
    line = run_of(1)[-1]
    changed = {name.replace("/", "_"): math.nan for name in line if name not in ("step", "groups/kept")}
    assert diagnose(folder_of(tmp_path, **changed).path).findings == ()


@pytest.mark.parametrize(
    ("broken", "message"), [("nowhere", "not the folder of a run"), ("torn", "line 2 of"), ("config", "config.json")]
)
def test_a_folder_that_cannot_be_read(tmp_path: Path, broken: str, message: str) -> None:
    folder = folder_of(tmp_path)
    if broken == "torn":
        lines = folder.metrics.read_text().splitlines()
        folder.metrics.write_text("\n".join([lines[0], "{torn", *lines[2:]]) + "\n")
    if broken == "config":
        folder.config.write_text("{}")
    with pytest.raises(ValueError, match=message):
        diagnose(tmp_path / "nowhere" if broken == "nowhere" else folder.path)


def test_a_cause_that_comes_and_goes_is_remembered_for_a_while() -> None:
    lines = run_of(LOOK_BACK + 5, stop_length=[0.9] * 9 + [0.0] * (LOOK_BACK - 4))
    history, (finding,) = replay(lines, recipe_with())
    assert (history.step, finding.name, finding.step) == (LOOK_BACK + 5, "token_limit", 9)
    assert replay(run_of(LOOK_BACK + 10, stop_length=[0.9] * 9 + [0.0] * (LOOK_BACK + 1)), recipe_with())[1] == ()


def test_a_cause_hides_what_was_seen_of_it_before() -> None:
    """Actions are cut off first, and only later success has visibly fallen."""
    lines = run_of(6, stop_length=0.9, success=[0.5, 0.5, 0.5, 0.0, 0.0, 0.0], groups_kept=32.0)
    assert [finding.name for finding in replay(lines[:4], recipe_with())[1]] == ["token_limit"]
    assert [finding.name for finding in replay(lines, recipe_with())[1]] == ["learning_rate"]


# ---------------------------------------------------------------- real runs


def test_a_run_whose_actions_have_one_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(micro_recipe(tmp_path, "rollout.max_action_tokens=1", "sft.updates=0"))
    assert "token_limit" in [finding.name for finding in diagnose(tmp_path / "run").findings]
    said = [record.finding for record in caplog.records if hasattr(record, "finding")]
    assert ("token_limit", 3) in [(finding.name, finding.step) for finding in said]


def test_a_run_whose_prompts_do_not_fit(tmp_path: Path) -> None:
    limits = (
        "rollout.max_prompt_tokens=5",
        "rollout.max_trajectory_tokens=9",
        "guards.max_dropped_groups=8",
        "sft.updates=0",
    )
    with pytest.raises(RunStopped):
        train(micro_recipe(tmp_path, *limits, "sft.updates=0"))
    (finding,) = diagnose(tmp_path / "run").findings
    assert finding.name == "prompt_too_long"
    assert "rollout.max_prompt_tokens = 5; the longest has" in finding.seen


def test_a_run_that_kept_no_group(tmp_path: Path) -> None:
    """Hops pays 0 to a model that knows no word."""
    with pytest.raises(RunStopped, match="8 groups in a row were dropped"):
        train(micro_recipe(tmp_path, "filter.name=dynamic_sampling", "guards.max_dropped_groups=8"))
    (last,) = (line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["step"] == 1)
    assert (last["groups/kept"], last["groups/dropped"]) == (0.0, 8.0)
    assert "filter" in [finding.name for finding in diagnose(tmp_path / "run").findings]
