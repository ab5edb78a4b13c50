import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit.stepping import assert_close, many, random_step, seeds
from support.making import few, group_lists, make_group, make_trajectory, make_turn
from turnwise.credit.weighting import WEIGHTINGS, constant, group_mean, token_mean, trajectory_mean, turn_mean
from turnwise.types import Group, Task, Trajectory, turns_of

MEANS = [token_mean, trajectory_mean, group_mean, turn_mean]
ALL = [weighting.function for weighting in WEIGHTINGS.values()]


def flat(weights):
    return np.concatenate(weights) if weights else np.zeros(0)


def slow_weights(groups, of_turn):
    """[group][attempt][turn][token] of a function of (group, attempt, turn)."""

    def of_attempt(group, trajectory):
        return [[of_turn(group, trajectory, turn) for _ in turn.action] for turn in trajectory.turns]

    return [[of_attempt(group, trajectory) for trajectory in group.trajectories] for group in groups]


@pytest.mark.parametrize("weigh", ALL)
@many
@given(seed=seeds)
def test_weights_equal_their_definition(weigh, seed):
    groups = random_step(seed)
    attempts = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [turn for trajectory in attempts for turn in trajectory.turns]
    num_tokens = sum(len(turn.action) for turn in turns)
    num_turns = sum(len(turn.action) > 0 for turn in turns)
    num_attempts = sum(trajectory.num_action_tokens > 0 for trajectory in attempts)

    def size(group):
        return sum(trajectory.num_action_tokens for trajectory in group.trajectories)

    num_groups = sum(size(group) > 0 for group in groups)
    shares = {
        token_mean: lambda group, trajectory, turn: 1 / num_tokens,
        trajectory_mean: lambda group, trajectory, turn: 1 / (num_attempts * trajectory.num_action_tokens),
        group_mean: lambda group, trajectory, turn: 1 / (num_groups * size(group)),
        turn_mean: lambda group, trajectory, turn: 1 / (num_turns * len(turn.action)),
        constant: lambda group, trajectory, turn: 1 / (num_attempts * 1024),
    }
    assert_close(groups, weigh(groups), slow_weights(groups, shares[weigh]))


def test_constant_has_a_length():
    groups = [make_group([0.0, 1.0], num_turns=[3, 1])]
    assert flat(constant(groups, length=10)).tolist() == [0.05] * 8
    assert flat(constant(groups, length=1)).tolist() == [0.5] * 8
    with pytest.raises(ValueError, match="length must be at least 1"):
        constant([], length=0)


@pytest.mark.parametrize("weigh", MEANS)
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


@pytest.mark.parametrize("weigh", [each.function for each in WEIGHTINGS.values() if not each.depends_on_turns])
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


def test_splitting_a_turn_in_two_gives_its_attempt_more_by_turn():
    whole, other = make_trajectory([(1, 4)]), make_trajectory([(1, 4)])
    groups = [Group(Task("a", "b"), (split_turn(whole, 0, 1), other))]
    assert [values.sum() for values in turn_mean(groups)] == pytest.approx([1 / 3] * 3)


def test_twelve_turns_count_once_next_to_one():
    groups = [make_group([0.0, 0.0], num_turns=[12, 1]), make_group([0.0])]
    assert flat(trajectory_mean(groups)[:12]).sum() == pytest.approx(1 / 3)
    assert flat(group_mean(groups)[:13]).sum() == pytest.approx(1 / 2)
    assert flat(turn_mean(groups)[:12]).sum() == pytest.approx(12 / 14)
    assert flat(token_mean(groups)[:12]).sum() == pytest.approx(12 / 14)


def test_long_attempts_outweigh_short_ones_by_token_and_not_by_attempt():
    groups = [Group(Task("a", "b"), (make_trajectory([(1, 9)]), make_trajectory([(1, 1)])))]
    assert [values.sum() for values in token_mean(groups)] == pytest.approx([0.9, 0.1])
    assert [values.sum() for values in trajectory_mean(groups)] == pytest.approx([0.5, 0.5])


def test_an_attempt_without_tokens_takes_no_share():
    groups = [Group(Task("a", "b"), (make_trajectory([(1, 0)]), make_trajectory([(1, 2)])))]
    for weigh in MEANS:
        assert [values.tolist() for values in weigh(groups)] == [[], [0.5, 0.5]]
    assert [values.tolist() for values in constant(groups, length=4)] == [[], [0.25, 0.25]]


def test_failed_attempts_take_no_share():
    group = make_group([0.0, 1.0])
    lost = make_trajectory([(1, 5)], status="timed_out")
    for weigh in MEANS:
        assert flat(weigh([Group(group.task, group.trajectories, (lost,))])).tolist() == [0.25] * 4


@pytest.mark.parametrize("weigh", ALL)
def test_nothing_weighs_nothing(weigh):
    assert weigh([]) == []
    assert [len(values) for values in weigh([Group(Task("a", "b"), (make_trajectory([(1, 0), (1, 0)]),))])] == [0, 0]
