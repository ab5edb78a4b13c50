from functools import partial

import numpy as np
import pytest
from hypothesis import given

from credit.stepping import many, nested, random_step, seeds
from support.making import make_group, make_trajectory
from turnwise.credit.totals import grpo
from turnwise.credit.truncation import TRUNCATIONS, is_truncated, mask_truncated, zero_rewards
from turnwise.credit.weighting import WEIGHTINGS, constant, token_mean, trajectory_mean
from turnwise.types import Group, Status, Task, turns_of


@pytest.mark.parametrize("status", Status)
def test_truncated_is_cut_short_by_a_limit(status):
    assert is_truncated(make_trajectory([(1, 1)], status=status)) == (
        status in ("too_many_turns", "too_long", "observation_too_large")
    )


@many
@given(seed=seeds)
def test_zeroed_takes_the_pay_of_truncated_attempts_and_nothing_else(seed):
    groups = random_step(seed)
    changed = zero_rewards(groups)
    assert [group.task for group in changed] == [group.task for group in groups]
    assert [group.failed for group in changed] == [group.failed for group in groups]
    for before, after in zip(groups, changed, strict=True):
        for one, other in zip(before.trajectories, after.trajectories, strict=True):
            if is_truncated(one):
                assert other.total == other.outcome == 0.0
                assert not any(turn.reward for turn in other.turns)
                assert other.status == one.status
            else:
                assert other is one
    for turn, now in zip(turns_of(groups), turns_of(changed), strict=True):
        for name in ("prompt", "action", "logprobs", "versions"):
            assert np.array_equal(getattr(turn, name), getattr(now, name))
        assert (turn.stop, turn.said, turn.heard, turn.timing) == (now.stop, now.said, now.heard, now.timing)


@pytest.mark.parametrize("weigh", [*(each.function for each in WEIGHTINGS.values()), partial(constant, length=7)])
@many
@given(seed=seeds)
def test_masked_weights_are_those_of_a_step_without_truncated_attempts(weigh, seed):
    groups = random_step(seed)
    whole = [Group(group.task, tuple(t for t in group.trajectories if t.status == Status.finished)) for group in groups]
    expected = iter(weigh(whole))
    for group, of_group in zip(groups, nested(groups, mask_truncated(weigh)(groups)), strict=True):
        for trajectory, of_attempt in zip(group.trajectories, of_group, strict=True):
            for values in of_attempt:
                if trajectory.status == Status.finished:
                    assert values.tolist() == next(expected).tolist()
                else:
                    assert not values.any()
    assert next(expected, None) is None


def three(status):
    """Attempts of 1, 2 and 1 tokens; the second, the best paid, ended as `status`."""
    cut = make_trajectory([(1, 1), (1, 1)], rewards=[0.5, 0.25], outcome=2.0, status=status)
    return [Group(Task("a", "b"), (make_trajectory([(1, 1)]), cut, make_trajectory([(1, 1)], outcome=1.0)))]


@pytest.mark.parametrize("status", [Status.too_many_turns, Status.too_long, Status.observation_too_large])
def test_train_mask_and_zero_by_hand(status):
    groups = three(status)

    def credit_and_weights(name):
        credit = grpo(TRUNCATIONS[name].pay(groups), {}, norm_by_std=False)
        weights = TRUNCATIONS[name].weigh(trajectory_mean)(groups)
        return [values.item() for values in credit], [values.item() for values in weights]

    assert credit_and_weights("train") == (
        pytest.approx([-1.25, 1.5, 1.5, -0.25]),
        pytest.approx([1 / 3, 1 / 6, 1 / 6, 1 / 3]),
    )
    assert credit_and_weights("mask") == (pytest.approx([-1.25, 1.5, 1.5, -0.25]), [0.5, 0.0, 0.0, 0.5])
    assert credit_and_weights("zero") == (
        pytest.approx([-1 / 3, -1 / 3, -1 / 3, 2 / 3]),
        pytest.approx([1 / 3, 1 / 6, 1 / 6, 1 / 3]),
    )


def test_names():
    assert list(TRUNCATIONS) == ["train", "mask", "zero"]


def test_where_all_are_truncated_nothing_weighs_anything():
    group = make_group([0.0])
    cut = make_trajectory([(1, 2)], status=Status.too_long)
    assert [values.tolist() for values in mask_truncated(token_mean)([Group(group.task, (cut,))])] == [[0.0, 0.0]]
    assert mask_truncated(token_mean)([]) == []
