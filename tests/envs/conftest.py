from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from turnwise.data.factbook import FACTBOOK

OWN = Path("~/.cache/turnwise").expanduser()


@pytest.fixture
def real_factbook() -> Path:
    """The World Factbook, where the user has fetched it."""
    found = OWN / FACTBOOK.folder.name
    if not found.is_dir():
        pytest.skip("run: turnwise data factbook")
    shutil.copytree(found, FACTBOOK.folder)
    return FACTBOOK.folder
