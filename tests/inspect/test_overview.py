"""The numbers that sum a run up."""

import json

import pytest

from support.reported import recorded_run
from turnwise.inspect.overview import RunOverview
from turnwise.inspect.run_reader import RunReader
from turnwise.runs.folder import RunFolder
from turnwise.runs.tracker import JsonLines

AFTER = {"e": [1.0], "f": [1.0], "g": [1.0], "h": [0.0]}


def overview_of(run):
    run.refresh()
    return RunOverview.of(run)


def test_a_run_that_goes_on(tmp_path):
    run = recorded_run(tmp_path / "run")
    found = overview_of(run)
    assert (found.name, found.environments, found.step, found.steps) == ("run", ("hops",), 2, 2)
    assert (found.is_over, found.updates, found.attempts, found.sampled_tokens) == (False, None, 8, 32)
    assert found.seconds == 4.0
    assert found.before("sampled").success == 0.25
    assert found.after("sampled") is None
    assert found.gain(run, "sampled") is None


def test_a_run_that_is_over(tmp_path):
    run = recorded_run(tmp_path / "run", AFTER)
    seconds = {"train": 9.0, "warm_start": 3.0, "record": 0.5}
    run.folder.summary.write_text(json.dumps({"updates": 4, "seconds": seconds}))
    found = overview_of(run)
    assert (found.is_over, found.updates) == (True, 4)
    assert found.seconds == 12.0
    assert found.stages == {"warm start": 3.0, "steps": 4.0, "evaluations": 0.0, "records": 0.5}
    gain = found.gain(run, "sampled")
    assert (gain.paired_tasks, gain.better, gain.worse) == (4, 2, 0)
    assert gain.p_value == pytest.approx(0.5)


@pytest.mark.parametrize(("overlap", "seconds"), [(False, 9.0), (True, 4.0)])
def test_evaluations_that_overlap_take_no_time_of_their_own(tmp_path, overlap, seconds):
    folder = RunFolder.create(tmp_path / "run", {"schedule": {"overlap_evaluations": overlap}})
    log = JsonLines(folder.metrics)
    log.log(0, {"seconds/evaluation/sampled": 1.0})
    log.log(1, {"seconds/step": 3.0, "seconds/evaluation/sampled": 5.0})
    assert overview_of(RunReader(folder)).seconds == seconds


@pytest.mark.parametrize("config", [{}, {"env": 3, "steps": "many", "rollout": [], "evaluation": 1}, {"env": [1, {}]}])
def test_a_folder_with_nothing_in_it(tmp_path, config):
    found = overview_of(RunReader(RunFolder.create(tmp_path / "run", config)))
    assert (found.step, found.steps, found.attempts, found.seconds, found.held_out) == (0, None, 0, 0.0, {})
