"""The tutorial, as it is written: its files, its commands, and what it says comes out."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import DOCS
from turnwise.cli.commands import main

PAGE = DOCS / "start" / "tutorial.md"
SMALL = ["steps=2", "groups_per_step=2", "sft.updates=4", "sft.batch=4", "model.layers=1", "evaluation.final_tasks=8"]


def blocks(language: str) -> list[str]:
    """The page's code blocks in a language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


def commands() -> list[list[str]]:
    """The page's `turnwise` commands, in order, without the program's name."""
    lines = [line for block in blocks("") for line in block.splitlines()]
    return [shlex.split(line.split("turnwise ", 1)[1]) for line in lines if line.startswith("PYTHONPATH=. ")]


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the tutorial's two files, in which one is."""
    (code,), (recipe,) = blocks("python"), blocks("toml")
    (tmp_path / "office.py").write_text(code)
    (tmp_path / "office.toml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("office", None)


def test_the_commands_work_at_a_small_size(office: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play, train, evaluate = commands()
    assert (play[0], train[0], evaluate[0]) == ("play", "train", "eval")
    monkeypatch.setattr("sys.stdin", io.StringIO("nothing\n"))
    assert main(play) == 0
    assert main([*train, *SMALL]) == 0
    assert main([*evaluate[: evaluate.index("--tasks")], "--tasks", "4"]) == 0


@pytest.mark.slow
def test_the_agent_learns_as_the_page_says(office: Path) -> None:
    _, train, evaluate = commands()
    assert main(train) == 0
    summary = json.loads((office / "runs" / "office-0" / "summary.json").read_text())
    before, after = summary["before"]["sampled"], summary["after"]["sampled"]
    claimed = re.findall(r"held-out success ([\d.]+) sampled", PAGE.read_text())
    assert after > before + 0.2
    assert abs(after - float(claimed[-1])) < 0.1
    assert main(evaluate) == 0
