"""turnwise rescore as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.replaying import copied, of_somebody_else, record_run, same_weights
from support.running import mistake
from turnwise.cli.commands import main
from turnwise.cli.rescore import environment_overrides
from turnwise.runs.archive import read_step, step_path
from turnwise.runs.folder import RunFolder
from turnwise.runs.origin import Origin


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"), "steps=2")


def content(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_another_environment_is_reported_with_keys_that_show_opens(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(recorded)
    assert main(["rescore", str(recorded), "--env", "support.rescoring:Generous"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"steps 1 to 2 of {recorded}, scored again by hops (support.rescoring:Generous)" in lines
    key = next(line.split()[0] for line in lines if line.startswith("train/"))
    assert main(["show", str(recorded), key]) == 0
    assert key in capsys.readouterr().out
    assert content(recorded) == before


def test_the_written_folder_is_shown_trained_on_and_imitated(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rescored"
    assert main(["rescore", str(recorded), "env.0.settings.link_reward=0.5", "--out", str(out)]) == 0
    assert json.loads((out / "config.json").read_text())["env"][0]["settings"] == {"link_reward": 0.5}
    assert Origin.read(RunFolder.open(out)).kind == "rescored"
    assert main(["show", str(out), "--best", "--limit", "1"]) == 0
    assert "has records up to step 2 and no checkpoint" not in mistake(capsys, "train", "--resume", str(out))
    assert main(["train", "--from", str(out), f"out={tmp_path / 'again'}"]) == 0
    assert "so nothing is compared" in capsys.readouterr().out
    assert not same_weights(recorded, tmp_path / "again", 2)
    assert main(["sft", "--from", str(out), "--min-reward", "0.5", "sft.updates=1", f"out={tmp_path / 'm'}"]) == 0
    assert "exists already" in mistake(capsys, "rescore", str(recorded), "--out", str(out))


def test_an_environment_that_only_fails_ends_with_1_and_its_reasons(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "failed"
    command = ["rescore", str(recorded), "--env", "support.rescoring:Raising", "--step", "1", "--out", str(out)]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert "the reward model is away" in printed.out
    assert "Traceback" in printed.err
    records = read_step(step_path(out / "archive", 1))
    assert all(not record.kept and not record.group.trajectories for record in records)


def test_mistakes_are_one_line_and_leave_no_folder(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["rescore", str(recorded), "--out", str(tmp_path / "no")]
    assert "optimizer.learning_rate=1 would be ignored" in mistake(capsys, *start, "optimizer.learning_rate=1")
    assert "rollout.max_turns=2 would be ignored" in mistake(capsys, *start, "rollout.max_turns=2")
    assert "score at least one attempt" in mistake(capsys, *start, "--limit", "0")
    assert "has no step 9" in mistake(capsys, *start, "--step", "9")
    assert "no Nothing" in mistake(capsys, *start, "--env", "support.rescoring:Nothing")
    assert "the run has no environment maze" in mistake(capsys, *start, "--env", "maze=support.rescoring:Wordy")
    assert "link_reward" in mistake(capsys, *start, "--env", "support.rescoring:Stubborn")
    assert not (tmp_path / "no").exists()
    run = copied(recorded, tmp_path)
    path = step_path(run / "archive", 2)
    path.write_bytes(path.read_bytes()[:-9])
    assert "step-000002.parquet" in mistake(capsys, "rescore", str(run))


def test_a_run_of_somebody_else_is_asked_about(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = of_somebody_else(recorded, tmp_path)
    assert "If you want that, add --trust" in mistake(capsys, "rescore", str(run), "--limit", "1")
    assert main(["rescore", str(run), "--limit", "1", "--trust"]) == 0


def test_environments_are_named_by_their_dataset_where_there_are_several() -> None:
    assert environment_overrides(["hops"], ["a:B"]) == ['env.0.name="a:B"', 'env.0.dataset="hops"']
    assert environment_overrides(["x", "y"], ["y=a:B"]) == ['env.1.name="a:B"', 'env.1.dataset="y"']
    with pytest.raises(ValueError, match="write DATASET=a:B"):
        environment_overrides(["x", "y"], ["a:B"])
