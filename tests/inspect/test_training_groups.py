"""Intervals of training steps over their groups."""

import pytest

from support.recorded import attempt, record
from turnwise.inspect.run_reader import RunReader
from turnwise.inspect.training_groups import spreads_of
from turnwise.runs.archive import write_step
from turnwise.runs.folder import RunFolder
from turnwise.runs.interval import clustered, half_width
from turnwise.types import Status, Trajectory


def test_groups_are_what_is_independent(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    lost = Trajectory((), Status.failed, failure="gone")
    groups = [
        record("a", attempt(1.0), attempt(1.0)),
        record("b", attempt(0.0), attempt(0.5), failed=[lost]),
        record("c", attempt(1.0), attempt(0.0), kept=False),
    ]
    write_step(folder.archive, 7, groups)
    write_step(folder.archive, 8, [record("a", attempt(1.0), attempt(0.0))])
    run = RunReader(folder)
    run.refresh()
    first, second = spreads_of(run)
    assert first.step == 7
    assert (first.success_low, first.success_high) == clustered([(2, 2), (0, 2), (1, 2)])
    assert first.reward == pytest.approx(3.5 / 6)
    assert first.reward_half_width == pytest.approx(half_width([1.0, 0.25, 0.5]))
    assert second.reward_half_width != second.reward_half_width  # one group has no spread


def test_a_run_without_attempts_has_none(tmp_path):
    run = RunReader(RunFolder.create(tmp_path / "run", {}))
    run.refresh()
    assert list(spreads_of(run)) == []
