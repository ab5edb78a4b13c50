"""Where files lie in memory, so that processes of one machine share them without a disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def shared_memory_folder() -> Path:
    """A folder in memory; the one for temporary files on machines without such a folder."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
