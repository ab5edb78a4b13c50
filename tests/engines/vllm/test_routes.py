"""Routes of vLLM itself against the learner's own, in float32 on a CPU.

They need Triton beside vLLM, whose kernels are interpreted here: pip install --no-deps triton.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engines.vllm.ask_routes import mixture
from support.mixture import OwnRoutes
from turnwise.plan.routes import settle_routes

HERE = Path(__file__).parent
WITHOUT_TRITON = importlib.util.find_spec("triton") is None


def asked(kind: str, folder: Path):
    """The attempts of a process that may interpret Triton's kernels."""
    path = [HERE / "interpreted", HERE.parent.parent, *sys.path]
    settings = {"PYTHONPATH": os.pathsep.join(map(str, path)), "VLLM_USE_V2_MODEL_RUNNER": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "engines.vllm.ask_routes", kind, str(folder)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads((folder / "attempts.pickle").read_bytes())


@pytest.mark.skipif(WITHOUT_TRITON, reason="vLLM gives routes with Triton only")
@pytest.mark.parametrize("kind", ["local", "server"])
def test_vllm_takes_the_experts_that_the_learner_takes(kind, tmp_path):
    *attempts, other = asked(kind, tmp_path)
    assert [len(turn.routes) for attempt in attempts for turn in attempt.turns] == [45, 10, 10] * 2
    for attempt, seed in [*((attempt, 0) for attempt in attempts), (other, 1)]:
        own, turns = OwnRoutes(mixture(seed)), attempt.turns
        settled = settle_routes(turns)
        for place, turn in enumerate(turns):
            rows = settled.rows[place][:-1]
            assert (rows >= 0).all()
            np.testing.assert_array_equal(np.sort(settled.table[rows]), np.sort(own.of(turn)[:-1]))
    assert {int(version) for turn in other.turns for version in turn.versions} == {1}
