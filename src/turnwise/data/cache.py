"""The user's cache: what is fetched or computed once and kept between runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from turnwise.runs.atomic import atomic_folder


def cache_folder() -> Path:
    """Where it is: TURNWISE_CACHE, or else ~/.cache/turnwise."""
    return Path(os.environ.get("TURNWISE_CACHE", "~/.cache/turnwise")).expanduser()


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, which `make` fills where it is not there yet. Processes that want the same one wait for the first,
    and nobody sees it half made."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                with atomic_folder(folder) as aside:
                    make(aside)
    return folder
