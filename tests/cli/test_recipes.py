"""`turnwise recipes`, and names of recipes in other commands."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import RECIPES
from turnwise.cli.commands import main
from turnwise.evaluation.target import EvaluationTarget

SMALL = ["steps=1", "groups_per_step=2", "sft.updates=2", "sft.batch=2", "model.layers=1", "evaluation.final_tasks=2"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_they_are_listed_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [path.stem for path in sorted(RECIPES.glob("*.toml"))]
    assert all(len(line.split()) > 5 for line in lines)


def test_listing_imports_nothing_heavy() -> None:
    code = (
        "import sys; from turnwise.cli.commands import main; main(['recipes']); main(['recipes', 'ppo']); "
        "print({'torch', 'transformers', 'pydantic', 'numpy'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_one_is_printed_exactly(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", path.stem]) == 0
    assert capsys.readouterr().out == path.read_text()


def test_an_unknown_one_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "gipgo"]) == 2
    assert capsys.readouterr().err == (
        "turnwise: no recipe gipgo comes with turnwise; turnwise recipes lists those that do; did you mean gigpo?\n"
    )
    assert main(["eval", "quikstart"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean quickstart?\n")


def test_eval_takes_a_name_and_a_folder_of_that_name_first(empty_folder: Path) -> None:
    assert EvaluationTarget.find("quickstart", None, None, []).name == "the model of quickstart"
    Path("quickstart").mkdir()
    with pytest.raises(ValueError, match="quickstart"):
        EvaluationTarget.find("quickstart", None, None, [])


def test_play_takes_a_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("answer nobody\n"))
    assert main(["play", "quickstart"]) == 0
    assert "start " in capsys.readouterr().out


@pytest.mark.parametrize("file", ["quickstart", "quickstart.toml"])
def test_a_file_of_the_folder_wins_and_is_said(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_text("stepps = 1\n")
    for command in ("train", "sft", "eval", "play"):
        assert main([command, "quickstart"]) == 2
        note, mistake, *_ = capsys.readouterr().err.splitlines()
        assert note.startswith(f"turnwise: quickstart: the file {file} in this folder, not the recipe")
        assert "unknown key stepps" in mistake


def test_an_environment_of_the_same_name_is_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """math is a recipe and an environment, and a file of one's own may have the name too."""
    Path("hops.toml").write_text("stepps = 1\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("answer nobody\n"))
    assert main(["play", "hops"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_printed_recipe_trains_like_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes", "quickstart"])
    Path("my.toml").write_text(capsys.readouterr().out)
    assert main(["train", "my.toml", "out=runs/mine", *SMALL]) == 0
    assert main(["train", "quickstart", *SMALL]) == 0
    mine, named = (Path("runs", name, "archive").exists() for name in ("mine", "quickstart"))
    assert mine
    assert named
    assert main(["sft", "quickstart", "out=models/warm", *SMALL]) == 0
    assert main(["eval", "models/warm", "--recipe", "quickstart", *SMALL[2:]]) == 0


@pytest.mark.slow
def test_paths_of_a_recipe_mean_the_working_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """distill reads the checkpoint that hops writes, also as a copy."""
    assert main(["train", "hops", *SMALL, "steps=1"]) == 0
    main(["recipes", "distill"])
    text = capsys.readouterr().out.rpartition("# On-policy")[2]
    Path("my.toml").write_text("# On-policy" + text)
    teacher = next(Path("runs/hops/checkpoints").glob("step-*"))
    assert main(["train", "my.toml", *SMALL, f"teacher={teacher}"]) == 0
    assert main(["train", "my.toml", *SMALL, "out=runs/other"]) == 2
    assert "runs/hops/checkpoints/step-000050" in capsys.readouterr().err
