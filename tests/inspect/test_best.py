"""The best attempts of a run, and the model that imitates them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from support.making import make_trajectory
from support.recorded import attempt, record
from turnwise.inspect.best import choose_best
from turnwise.rollout.demonstrate import ArchivedDemonstrations
from turnwise.runs.archive import step_path, write_step
from turnwise.runs.checksums import Damaged
from turnwise.runs.evaluations import write_evaluation
from turnwise.runs.folder import RunFolder
from turnwise.types import Status, Trajectory


def paid(outcome, seed=0, **how):
    return make_trajectory([(3, 2)] * 2, outcome=outcome, seed=seed, **how)


def actions(trajectory):
    return [turn.action.tolist() for turn in trajectory.turns]


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    lost = Trajectory((), Status.failed, failure="gone")
    first = [
        record("a", paid(0.0, 1), paid(1.0, 2), paid(1.0, 2), paid(2.0, 3), failed=[lost]),
        record("b", paid(0.5, 4), kept=False),
    ]
    write_step(folder.archive, 1, first)
    write_step(folder.archive, 2, [record("a", paid(2.0, 5)), record("c", paid(1.0, 6), kept=False)])
    write_evaluation(folder.evaluations, 2, "greedy", [record("held-out", attempt(9.0), kept=False).group], 1.0, str)
    return folder


def test_the_best_attempt_at_each_task_is_chosen_the_later_among_equals(run):
    best = choose_best(run.path, 1, 1.0)
    assert {task.id: [actions(one) for one in found] for task, found in best.chosen.items()} == {
        "a": [actions(paid(2.0, 5))],
        "c": [actions(paid(1.0, 6))],
    }
    assert best.describe() == (
        f"2 of 7 attempts of steps 1 to 2 of {run.path}, at 2 tasks: at most 1 each, paid 1 or more"
    )


def test_several_at_a_task_are_never_the_same_tokens(run):
    best = choose_best(run.path, 9, 1.0)
    found = {task.id: [one.total for one in attempts] for task, attempts in best.chosen.items()}
    assert found == {"a": [2.0, 2.0, 1.0], "c": [1.0]}


def test_a_step_and_another_threshold_can_be_chosen(run):
    assert [task.id for task in choose_best(run.path, 1, 0.5, 1).chosen] == ["a", "b"]


def test_nothing_to_choose_is_one_line(run):
    with pytest.raises(ValueError, match="none of 7 attempts of .* was paid 5 or more; lower --min-reward"):
        choose_best(run.path, 1, 5.0)
    with pytest.raises(ValueError, match="choose at least one"):
        choose_best(run.path, 0, 0.0)


def test_a_damaged_step_is_refused(run):
    path = step_path(run.archive, 2)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises((Damaged, ValueError), match="step-000002.parquet"):
        choose_best(run.path, 1, 0.0)


def test_the_file_has_the_exact_tokens_and_the_rule_the_content_of_the_source(run, tmp_path):
    best = choose_best(run.path, 2, 1.0)
    best.write(tmp_path / "attempts.parquet")
    archived = ArchivedDemonstrations(tmp_path / "attempts.parquet")
    wanted = [one for attempts in best.chosen.values() for one in attempts]
    assert len(archived.tasks) == len(wanted) == 3
    for task, one in zip(archived.tasks, wanted, strict=True):
        [found] = archived.group(task).trajectories
        for turn, same in zip(found.turns, one.turns, strict=True):
            np.testing.assert_array_equal(turn.prompt, same.prompt)
            np.testing.assert_array_equal(turn.action, same.action)
    before = best.rule
    assert json.loads(json.dumps(before)) == before
    write_step(run.archive, 2, [record("a", paid(2.0, 7))])
    assert choose_best(run.path, 2, 1.0).rule["digests"] != before["digests"]


def test_a_file_without_attempts_is_no_demonstration(tmp_path):
    write_step(tmp_path, 1, [record("a", kept=False)])
    with pytest.raises(ValueError, match="holds no attempt that counts"):
        ArchivedDemonstrations(step_path(tmp_path, 1))
