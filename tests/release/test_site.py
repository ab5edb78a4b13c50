"""The site that `make docs` builds: order, links, search, and that it reaches no other host."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from support.paths import DOCS, ROOT

SITE = runpy.run_path(str(ROOT / ".ci" / "site.py"))


def test_the_order_is_that_of_the_index() -> None:
    first, *sections = SITE["nav"]((DOCS / "README.md").read_text())
    assert first == "README.md"
    assert [title for section in sections for title in section] == [
        "Start",
        "Guides",
        "Reference",
        "Explanation",
        "Experiments",
        "Decisions",
    ]
    listed = [page for section in sections for pages in section.values() for page in pages]
    assert set(listed) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}
    assert len(listed) == len(set(listed))


def test_files_outside_the_docs_have_a_place_in_the_site() -> None:
    assert SITE["in_site"]("docs/guides/view.md") == "guides/view.md"
    assert SITE["in_site"]("recipes/ppo.toml") == "repository/recipes/ppo.toml"


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(root / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run([*command, "--site-dir", str(out)], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_every_page_is_there_and_can_be_searched_for(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (site / page.relative_to(DOCS)).with_name(name).is_file(), page
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"start/install.html", "guides/view.html", "reference/recipes.html"} <= found
    assert any("unique tokens" in entry["text"] for entry in index["docs"])


@pytest.mark.slow
def test_a_page_loads_nothing_from_another_host(site: Path) -> None:
    """Links that a person follows may lead elsewhere; what a browser loads by itself may not."""
    loading = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
    for page in site.rglob("*.html"):
        assert not loading.findall(page.read_text()), page
        assert 'class="mermaid"' not in page.read_text()  # its library would come from a host of others
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style


@pytest.mark.slow
def test_links_and_anchors_of_the_site_lead_somewhere(site: Path) -> None:
    texts = {page: page.read_text() for page in site.rglob("*.html")}
    names = {page: set(re.findall(r'\bid="?([^"\s>]+)', text)) for page, text in texts.items()}
    broken = []
    for page, text in texts.items():
        if page.name == "404.html":  # its links count from the top of a server
            continue
        for target in re.findall(r'<a\b[^>]*?href="([^"]*)"', text):
            path, _, fragment = unquote(target).partition("#")
            if re.match(r"\w+:", path):
                continue
            linked = (page.parent / path).resolve() if path else page
            linked = linked / "index.html" if linked.is_dir() else linked
            if not linked.is_file() or (fragment and linked in names and fragment not in names[linked]):
                broken.append(f"{page.relative_to(site)} links to {target}")
    assert not broken


@pytest.mark.slow
@pytest.mark.parametrize("link", ["nowhere.md", "quickstart.md#nowhere", "../../nowhere.txt"])
def test_a_broken_link_fails_the_build(link: str, tmp_path: Path) -> None:
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "site.py", tmp_path / ".ci")
    (tmp_path / "docs" / "start").mkdir(parents=True)
    (tmp_path / "docs" / "README.md").write_text("# Docs\n\n## Start\n\n* [quickstart](start/quickstart.md)\n")
    page = tmp_path / "docs" / "start" / "quickstart.md"
    page.write_text("# Quickstart\n\n[constraints](../../constraints.txt)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    page.write_text(f"# Quickstart\n\n[broken]({link})\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert link.rpartition("/")[2].rpartition("#")[2] in done.stderr
