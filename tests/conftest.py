from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests are many and small
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm starts of tests stay out of the user's cache, and so does the key of tests."""
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TURNWISE_STATE", str(tmp_path / "state"))
