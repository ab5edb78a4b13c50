"""Every tracker that is installed takes what a run may report."""

import json
import math

import pytest

from support.tracking import installed, offline, opened
from turnwise.runs.trackers.attempts import SampledAttempt
from turnwise.runs.trackers.names import LIBRARIES

__all__ = ["offline"]
ODD = {"a": math.nan, "b": math.inf, "c": -math.inf, "größe (m)/x": 1.0, "pass@4": 1, "d": 1e308, "step_": 0.0}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.skipif(not installed(n), reason="not installed")) for n in LIBRARIES]
)
def test_a_tracker_takes_odd_values_and_a_resume_keeps_its_run(offline, caplog, name):
    if name == "trackio":
        pytest.skip("its folder is chosen when it is imported: test_trackio.py")
    offline.path.mkdir()
    ids = []
    for life, after in enumerate((-1, 2, 3)):
        [tracker] = opened(offline, [name], after)
        tracker.log(after + 1, ODD)
        tracker.log(after + 1, {"a": 0.0})
        tracker.log_attempts(after + 1, [])
        tracker.log_attempts(
            after + 1, [SampledAttempt("t\x00\n", 0, "failed", -1e30, 0, "\x1b[2J\x00 \U0001f600" * life)]
        )
        tracker.log(10**9, {})
        tracker.close()
        ids.append(json.loads((offline.trackers / f"{name}.json").read_text())["id"])
        assert tracker.where
    assert len(set(ids)) == 1
    assert [entry.getMessage() for entry in caplog.records if entry.name.startswith("turnwise")] == []
