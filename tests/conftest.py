from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests are many and small
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="session")
def forked() -> Iterator[None]:
    """Processes of tests are forks of one that has imported what they need, if a test starts any."""
    from turnwise.engines.remote.fork_server import forked_children

    models = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "qwen3_moe")]
    with forked_children(["turnwise.assemble.engines", "turnwise.assemble.learner", *models]):
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm starts of tests stay out of the user's cache, and so does the key of tests."""
    monkeypatch.setenv("TURNWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TURNWISE_STATE", str(tmp_path / "state"))
