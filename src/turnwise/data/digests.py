"""Digests of files by content, for what is made of them to be made again when they change."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from turnwise.atomic import write_atomically
from turnwise.data.cache import cache_folder

LARGE = 1 << 24
"""Bytes from which on a digest is remembered: of 16 GB it takes a good ten seconds."""
SETTLED = 2.0
"""Seconds after which a change of a file is sure to show in its times."""


def digest_of(path: Path) -> str:
    """Changes with the content of a file. That of a large one is remembered with its size, inode and times, of which no
    program can set the last."""
    before = path.stat()
    if before.st_size < LARGE:
        return computed(path)
    known = (str(path.resolve()), before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
    name = hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()
    place = cache_folder() / "digests" / name
    with suppress(OSError, ValueError):
        found = place.read_text(encoding="ascii").strip()
        if len(found) == 64:
            return found
    digest = computed(path)
    if time.time() - before.st_ctime > SETTLED:
        with suppress(OSError):  # it is only for speed
            place.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(place, digest + "\n")
    return digest


def computed(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_in(folder: Path) -> dict[str, str]:
    """By name: the digests of all files in a folder and below it; hidden ones are nobody's content."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                found[path.relative_to(folder).as_posix()] = digest_of(path)
    return found
