"""The files of the page: all that may be served, found once. No address becomes a path."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page."""

    content: bytes
    kind: str
    mark: str
    """Changes with the content."""


@cache
def page_files() -> dict[str, PageFile]:
    """By address: the files of the page."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in KINDS and path.is_file():
            content = path.read_bytes()
            mark = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            found["/" + path.relative_to(FOLDER).as_posix()] = PageFile(content, KINDS[path.suffix], mark)
    return found | {"/": found["/index.html"]} if "/index.html" in found else found
