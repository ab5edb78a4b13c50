"""Updates that grew with the number of turns.

Elsewhere mini-batches had a fixed number of rows. A row was a turn, so longer attempts made more optimizer steps out of
the same groups and the learning rate ran ahead of its schedule; and 64 tasks with 8 attempts of mostly two turns came
to 1032 rows, which did not divide by 512 and ended the run.
"""

from dataclasses import replace
from typing import Any

import pytest

from field_bugs.one_step import parts_of, step_on
from support.making import make_group
from turnwise.schedule.take import Taken
from turnwise.training.loop import train_step
from turnwise.types import Group

GROUPS, ATTEMPTS, GROUPS_PER_UPDATE, EPOCHS = 4, 2, 2, 2


def groups_of(num_turns):
    """Groups whose attempts have these numbers of turns."""
    return [
        make_group([float(attempt % 2) for attempt in range(len(counts))], num_turns=counts, name=f"task-{number}")
        for number, counts in enumerate(num_turns)
    ]


def check_updates_per_step(train, groups, groups_per_update, epochs):
    """A step makes as many optimizer steps as its groups are mini-batches, once per epoch."""
    rows = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
    try:
        updates = train(groups, groups_per_update, epochs)
    except Exception as error:
        raise AssertionError(f"a step of {rows} turns has ended the run: {error}") from error
    wanted = len(groups) // groups_per_update * epochs
    assert updates == wanted, f"{updates} updates where {wanted} are due, for {rows} turns"


def train_on_groups(groups, groups_per_update, epochs):
    """The optimizer steps of one training step."""
    return len(step_on(groups, f"groups_per_update={groups_per_update}", f"epochs={epochs}").updates)


def train_on_rows(groups, groups_per_update, epochs):
    """The same step where turns are what is counted: as many rows per update as the groups have attempts."""
    rows = [Group(g.task, (replace(t, turns=(turn,)),)) for g in groups for t in g.trajectories for turn in t.turns]
    rows_per_update = groups_per_update * len(groups[0].trajectories)
    if len(rows) % rows_per_update:
        raise RuntimeError(f"rows must be divisible by rows per update, got {len(rows)} and {rows_per_update}")
    parts = parts_of(len(rows), f"epochs={epochs}")
    settings = replace(parts.settings, groups_per_update=rows_per_update)
    learner: Any = parts.learner
    train_step(settings, parts.stages, learner, Taken(tuple(rows), ()), 0)
    return learner.num_updates


@pytest.mark.parametrize("turns", [1, 2, 3, 6])
def test_updates_do_not_depend_on_turns(turns):
    groups = groups_of([[turns] * ATTEMPTS] * GROUPS)
    check_updates_per_step(train_on_groups, groups, GROUPS_PER_UPDATE, EPOCHS)


def test_groups_of_any_lengths_divide():
    groups = groups_of([[1, 5], [2, 2], [7, 1], [3, 4]])
    check_updates_per_step(train_on_groups, groups, GROUPS_PER_UPDATE, EPOCHS)


def a_thousand_rows():
    """64 tasks with 8 attempts of two turns, but for 8 attempts of three: 1032 turns."""
    return groups_of([[3 if number < 8 and attempt == 0 else 2 for attempt in range(8)] for number in range(64)])


def test_1032_turns_of_64_groups_are_one_update():
    check_updates_per_step(train_on_groups, a_thousand_rows(), 64, 1)


def test_rows_per_update_are_caught():
    once = groups_of([[1] * ATTEMPTS] * GROUPS)
    check_updates_per_step(train_on_rows, once, GROUPS_PER_UPDATE, EPOCHS)  # it went well while turns were single
    six_times = groups_of([[6] * ATTEMPTS] * GROUPS)
    with pytest.raises(AssertionError, match="24 updates where 4 are due, for 48 turns"):
        check_updates_per_step(train_on_rows, six_times, GROUPS_PER_UPDATE, EPOCHS)


def test_rows_that_do_not_divide_are_caught():
    with pytest.raises(AssertionError, match="1032 turns has ended the run: .* got 1032 and 512"):
        check_updates_per_step(train_on_rows, a_thousand_rows(), 64, 1)
