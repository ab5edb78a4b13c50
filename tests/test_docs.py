"""What the docs show was run: the README's own environment trains, and the settings page is the code's."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from support.running import untimed
from turnwise.cli.commands import main


def block(language: str) -> str:
    """The README's only code block in a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return found


def test_the_readme_environment_is_short_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("python")
    assert len(code.splitlines()) <= 45
    (tmp_path / "lock.py").write_text(code)
    (tmp_path / "lock.toml").write_text(block("toml"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    small = ["steps=3", "sft.updates=20", "model.layers=2", "model.threads=1", "evaluation.final_tasks=8"]
    assert main(["train", "lock.toml", *small]) == 0
    lines = untimed(tmp_path / "runs" / "lock-0" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[0]["eval/sampled/status/failed"] == 0
    sys.modules.pop("lock", None)


def test_the_settings_page_is_made_from_the_code() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_recipes.py"))["page"]()
    assert (ROOT / "docs" / "recipes.md").read_text() == page, "run: python docs/make_recipes.py"


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
