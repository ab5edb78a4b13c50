"""The user's cache: what is fetched or computed once and kept between runs, with checksums that are looked at when it
is used again."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from turnwise.atomic import atomic_folder
from turnwise.runs.checksums import Damaged, check_checksums, write_checksums

log = logging.getLogger(__name__)

_proven: set[tuple[object, ...]] = set()
"""What this process has compared with its checksums; an index of gigabytes is asked for again and again."""


def cache_folder() -> Path:
    """Where it is: TURNWISE_CACHE, or else ~/.cache/turnwise."""
    return Path(os.environ.get("TURNWISE_CACHE", "~/.cache/turnwise")).expanduser()


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, which `make` fills where it is not there yet or damaged. Processes that want the same one wait for
    the first, and nobody sees it half made."""
    if not is_whole(folder):
        with alone(folder):
            if not is_whole(folder, "it is made again"):
                write(folder, make)
    return folder


def made_again(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, filled by `make` whether it is there or not."""
    with alone(folder):
        write(folder, make)
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Where no other process writes a folder of the cache."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(folder: Path, make: Callable[[Path], None]) -> None:
    with atomic_folder(folder) as aside:
        make(aside)
        write_checksums(aside)


def is_whole(folder: Path, then: str = "") -> bool:
    """Whether a folder of the cache is there as it was written; one that is not is named in a warning, which goes on
    with what happens `then`."""
    if not folder.is_dir():
        return False
    try:
        check_folder(folder)
    except Damaged as error:
        if then:
            log.warning("%s; %s", error, then)
        return False
    return True


def check_folder(folder: Path) -> None:
    """Raise Damaged where a folder of the cache is not as it was written. Files that have not changed since this
    process looked are not read again."""
    seen = (str(folder), *(_looks(path) for path in sorted(folder.rglob("*"))))
    if seen not in _proven:
        check_checksums(folder)
        _proven.add(seen)


def _looks(path: Path) -> tuple[object, ...]:
    found = path.stat()
    return path.name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
