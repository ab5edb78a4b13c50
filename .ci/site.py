"""Hooks of mkdocs: the order of the pages, and links that leave docs/.

The order is that of docs/README.md, which lists every page. Files outside docs/ that a page links to become files
of the site below `repository/`, so that every link can be followed and is tested by `mkdocs build --strict`.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)#\s]+)((?:#[^)\s]*)?\))")
OUTSIDE = "repository"


def on_config(config: Any) -> Any:
    config.nav = nav((ROOT / "docs" / "README.md").read_text())
    return config


def nav(index: str) -> list[Any]:
    """The sections of the index, each with the pages that it lists, in its order."""
    found: list[Any] = ["README.md"]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        pages = [path for path in re.findall(r"\]\(([^)#\s]+\.md)\)", text) if not path.startswith("..")]
        found.append({title.strip(): pages})
    return found


def on_files(files: Files, config: Any) -> Files:
    """Adds what lies outside docs/ and is linked to, directly or by another such page."""
    waiting = [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for _, target, _ in LINK.findall(prose((ROOT / page).read_text())):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            place = in_site(path)
            if path.startswith("docs/") or not (ROOT / path).is_file() or files.get_file_from_path(place):
                continue
            source = str(ROOT / path)
            files.append(File.generated(config, place, abs_src_path=source, inclusion=InclusionLevel.NOT_IN_NAV))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with links to where files are in the site."""
    place = page.file.src_uri
    own = place.removeprefix(f"{OUTSIDE}/") if place.startswith(f"{OUTSIDE}/") else f"docs/{place}"

    def moved(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), found[2]))
        return found[1] + os.path.relpath(in_site(path), posixpath.dirname(place) or ".") + found[3]

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
