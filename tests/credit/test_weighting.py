import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from making import few, group_lists, make_group, make_trajectory, make_turn
from turnwise.credit.weighting import WEIGHTINGS, token_mean, trajectory_mean
from turnwise.types import Group, Task, Trajectory, turns_of


def flat(weights):
    return np.concatenate(weights) if weights else np.zeros(0)


@pytest.mark.parametrize("weigh", WEIGHTINGS.values())
@few
@given(groups=group_lists())
def test_weights_sum_to_one_and_lie_on_action_tokens(weigh, groups):
    weights = weigh(groups)
    assert [len(values) for values in weights] == [len(turn.action) for turn in turns_of(groups)]
    everything = flat(weights)
    assert (everything > 0).all()
    if len(everything):
        assert everything.sum() == pytest.approx(1.0, abs=1e-12)


@few
@given(groups=group_lists(min_groups=1))
def test_token_mean_gives_every_token_the_same(groups):
    everything = flat(token_mean(groups))
    assert set(everything.tolist()) <= {1.0 / max(1, len(everything))}


@few
@given(groups=group_lists(min_groups=1))
def test_trajectory_mean_gives_every_attempt_with_tokens_the_same(groups):
    remaining = iter(trajectory_mean(groups))
    attempts = [trajectory for group in groups for trajectory in group.trajectories]
    num_trained = sum(trajectory.num_action_tokens > 0 for trajectory in attempts)
    for trajectory in attempts:
        values = flat([next(remaining) for _ in trajectory.turns])
        assert len(set(values.tolist())) <= 1
        assert values.sum() == pytest.approx(1.0 / num_trained if len(values) else 0.0, abs=1e-12)


def split_turn(trajectory, which, place):
    """The same attempt with the action of one turn cut in two: the second half follows the first as its own turn."""
    turns = list(trajectory.turns)
    turn = turns[which]
    first = make_turn(turn.prompt, turn.action[:place])
    second = make_turn(np.concatenate([turn.prompt, turn.action[:place]]), turn.action[place:])
    turns[which : which + 1] = [first, second]
    return Trajectory(tuple(turns), trajectory.status, trajectory.outcome)


@pytest.mark.parametrize("weigh", WEIGHTINGS.values())
@few
@given(groups=group_lists(min_groups=1, min_action=1), data=st.data())
def test_splitting_a_turn_in_two_changes_no_weight(weigh, groups, data):
    group = groups[0]
    trajectory = group.trajectories[0]
    which = data.draw(st.integers(0, len(trajectory.turns) - 1))
    place = data.draw(st.integers(0, len(trajectory.turns[which].action)))
    cut = split_turn(trajectory, which, place)
    assert len(cut.turns) == len(trajectory.turns) + 1
    split = [Group(group.task, (cut, *group.trajectories[1:])), *groups[1:]]
    assert flat(weigh(split)).tolist() == flat(weigh(groups)).tolist()


def test_long_attempts_outweigh_short_ones_by_token_and_not_by_attempt():
    groups = [Group(Task("a", "b"), (make_trajectory([(1, 9)]), make_trajectory([(1, 1)])))]
    assert [values.sum() for values in token_mean(groups)] == pytest.approx([0.9, 0.1])
    assert [values.sum() for values in trajectory_mean(groups)] == pytest.approx([0.5, 0.5])


def test_an_attempt_without_tokens_takes_no_share():
    groups = [Group(Task("a", "b"), (make_trajectory([(1, 0)]), make_trajectory([(1, 2)])))]
    for weigh in WEIGHTINGS.values():
        assert [values.tolist() for values in weigh(groups)] == [[], [0.5, 0.5]]


def test_failed_attempts_take_no_share():
    group = make_group([0.0, 1.0])
    lost = make_trajectory([(1, 5)], status="timed_out")
    for weigh in WEIGHTINGS.values():
        assert flat(weigh([Group(group.task, group.trajectories, (lost,))])).tolist() == [0.25] * 4


@pytest.mark.parametrize("weigh", WEIGHTINGS.values())
def test_nothing_weighs_nothing(weigh):
    assert weigh([]) == []
    assert [len(values) for values in weigh([Group(Task("a", "b"), (make_trajectory([(1, 0), (1, 0)]),))])] == [0, 0]
