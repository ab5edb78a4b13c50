"""A file of weights as a model folder, for servers that load folders."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "model.safetensors"


@contextmanager
def weight_folder(path: Path) -> Iterator[Path]:
    """A folder with this file and no other, beside it, while somebody reads it. The file is linked: a copy of the
    weights would cost as much as a load."""
    folder = Path(tempfile.mkdtemp(prefix="folder-", dir=path.parent))
    try:
        folder.chmod(0o755)  # a server may be another user's
        os.link(path, folder / NAME)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
