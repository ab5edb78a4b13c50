"""The parts of benchmarks/engines.py that figures depend on."""

import runpy

import numpy as np
import pytest

from support.paths import ROOT


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "engines.py"), run_name="engines")


def test_needed_tokens_are_unique_prefixes_that_sampling_did_not_compute(script):
    needed = script["needed_tokens"]
    assert needed([([1, 2, 3], [4, 5])]) == 3
    assert needed([([1, 2, 3], [4, 5]), ([1, 2, 3], [6])]) == 3
    assert needed([([1, 2, 3], [4, 5]), ([1, 2, 7], [6])]) == 4
    # Of the next turn: 5, which was sampled last and never computed, and what was observed.
    assert needed([([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 8, 9], [6])]) == 3 + 1 + 2


@pytest.mark.parametrize("workload", ["groups", "apart", "talks"])
def test_workloads_are_what_they_are_called(script, workload):
    work = script["talks"](workload, 64, 8192, seed=1)
    assert len(work) == 64
    assert len({tuple(which.prompt) for which in work}) == (64 if workload == "apart" else 8)
    assert {len(which.lengths) for which in work} == {4 if workload == "talks" else 1}
    assert all(180 <= len(which.prompt) <= 220 for which in work)
    lengths = np.concatenate([which.lengths for which in work])
    assert lengths.min() >= 1
    assert 100 < lengths.max() <= 256
    assert 36 < lengths.mean() < 60
    if workload == "talks":
        first = work[0]
        longer = first.next_prompt(first.prompt, [1, 2], 0)
        assert longer == [*first.prompt, 1, 2, *first.observations[0]]
        assert first.next_prompt(longer, [1], 3) is None
    again = script["talks"](workload, 64, 8192, seed=1)
    assert again == work
