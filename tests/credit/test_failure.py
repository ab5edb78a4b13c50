import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit.stepping import many, random_step, seeds
from support.making import make_group, make_trajectory
from turnwise.credit.failure import ON_FAILURE, drop, pay
from turnwise.credit.totals import rloo
from turnwise.credit.truncation import is_truncated
from turnwise.types import Group, Status, Trajectory


@many
@given(seed=seeds, value=st.sampled_from([-1.0, 0.0, 0.1]))
def test_failed_attempts_count_and_are_paid_the_value_and_nothing_else(seed, value):
    for group in random_step(seed):
        paid = pay(group, value=value)
        assert paid.task == group.task
        assert paid.failed == ()
        assert paid.trajectories[: len(group.trajectories)] == group.trajectories
        added = paid.trajectories[len(group.trajectories) :]
        for one, other in zip(group.failed, added, strict=True):
            assert other.total == other.outcome == value
            assert not any(turn.reward for turn in other.turns)
            assert other.status is Status.penalised
            assert not is_truncated(other)
            assert other.marks == {**one.marks, str(one.status): 1.0}
            for before, after in zip(one.turns, other.turns, strict=True):
                assert np.array_equal(before.prompt, after.prompt)
                assert np.array_equal(before.action, after.action)
                assert np.array_equal(before.logprobs, after.logprobs)


def test_attempts_without_a_turn_and_prompts_too_long_stay_failed():
    group = make_group([1.0])
    nothing = Trajectory((), Status.failed)
    late = Trajectory((), Status.timed_out)
    misfit = Trajectory((), Status.prompt_too_long)
    odd = make_trajectory([(1, 1)], status=Status.prompt_too_long)
    crashed = make_trajectory([(1, 1)], outcome=9.0, status=Status.failed)
    paid = pay(Group(group.task, group.trajectories, (nothing, crashed, late, misfit, odd)), value=-1.0)
    assert paid.failed == (nothing, late, misfit, odd)
    assert [trajectory.total for trajectory in paid.trajectories] == [1.0, -1.0]


def test_a_failed_attempt_keeps_its_marks_and_its_status():
    late = Trajectory(make_trajectory([(1, 1)]).turns, Status.timed_out, marks={"lookups": 3.0})
    [paid] = pay(Group(make_group([]).task, (), (late,))).trajectories
    assert paid.marks == {"lookups": 3.0, "timed_out": 1.0}


def test_crashing_is_no_way_out_of_a_bad_return():
    """Dropped, the crash leaves the failure to its fellow; paid, it is what the group learns to avoid."""
    group = make_group([1.0, 1.0])
    crashed = make_trajectory([(1, 2)], status=Status.failed)
    group = Group(group.task, group.trajectories, (crashed,))
    assert not np.concatenate(rloo([ON_FAILURE["drop"].function(group)], {})).any()
    credit = rloo([ON_FAILURE["pay"].function(group)], {})
    assert [values[0] for values in credit] == [0.5, 0.5, -1.0]


def test_drop_leaves_a_group_unchanged():
    group = make_group([1.0])
    assert drop(group) is group


def test_a_value_is_finite():
    group = make_group([1.0])
    with pytest.raises(ValueError, match="finite"):
        pay(Group(group.task, (), (make_trajectory([(1, 1)], status=Status.failed),)), value=math.nan)
