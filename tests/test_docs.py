"""The docs against the code: the README's environment trains, generated pages are current, and links resolve."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

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


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("reference", "recipes"),
        ("reference", "metrics"),
        ("reference", "python"),
        ("reference", "transcripts"),
        ("guides", "why"),
    ],
)
def test_a_generated_page_is_what_the_code_makes(folder: str, name: str) -> None:
    page = runpy.run_path(str(ROOT / "docs" / f"make_{name}.py"))["page"]()
    assert (ROOT / "docs" / folder / f"{name}.md").read_text() == page, f"run: python docs/make_{name}.py"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def pages() -> list[Path]:
    """Every Markdown page of the repository."""
    return [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub spells them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_in_the_docs_lead_somewhere() -> None:
    broken = []
    for page in pages():
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            path, _, fragment = target.partition("#")
            if path.startswith("http"):
                continue
            linked = page.parent / path if path else page
            if not linked.exists() or (fragment and fragment not in anchors(linked)):
                broken.append(f"{page.relative_to(ROOT)} links to {target}")
    assert not broken


def test_the_index_of_the_docs_names_every_page() -> None:
    folder = ROOT / "docs"
    listed = set(re.findall(r"\]\(([^)#\s]+\.md)\)", (folder / "README.md").read_text()))
    written = {str(page.relative_to(folder)) for page in folder.rglob("*.md")} - {"README.md"}
    assert written <= listed


def test_the_map_names_every_package() -> None:
    named = set(re.findall(r"`(\w+)/`", (ROOT / "CONTRIBUTING.md").read_text()))
    packages = {path.parent.name for path in (ROOT / "src" / "turnwise").glob("*/__init__.py")}
    assert packages <= named


def test_decisions_have_a_date_and_a_status() -> None:
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        title, blank, dated = page.read_text().splitlines()[:3]
        assert title.startswith("# ")
        assert not blank
        assert re.fullmatch(r"Date: \d{4}-\d\d-\d\d\. Status: (proposed|accepted|superseded by .+)\.", dated), page.name


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}
    assert "secrets" not in (ROOT / ".github" / "workflows" / "ci.yml").read_text().replace("no secrets", "")
