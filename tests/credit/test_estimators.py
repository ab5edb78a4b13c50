import math
import statistics
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from making import few, group_lists, make_group, make_trajectory
from turnwise.credit.estimators import ESTIMATORS, centre, grpo, imitate, reinforce, rloo
from turnwise.types import Group, Task, turns_of

ALL = [*ESTIMATORS.values(), imitate]


def dr_grpo(groups, scores):
    return grpo(groups, scores, norm_by_std=False)


# Slow and obvious: the advantage of one attempt, from its own total, those of its group and those of the step.


def obvious_grpo(total, group, step):
    return (total - statistics.mean(group)) / (statistics.stdev(group) + 1e-6) if len(group) > 1 else 0.0


def obvious_dr_grpo(total, group, step):
    return total - statistics.mean(group)


def obvious_rloo(total, group, step):
    others = list(group)
    others.remove(total)
    return total - statistics.mean(others) if others else 0.0


def obvious_reinforce(total, group, step):
    others = list(step)
    others.remove(total)
    return total - statistics.mean(others) if others else total


def obvious_imitation(total, group, step):
    return 1.0


PAIRS = [
    (grpo, obvious_grpo),
    (dr_grpo, obvious_dr_grpo),
    (rloo, obvious_rloo),
    (reinforce, obvious_reinforce),
    (imitate, obvious_imitation),
]


def by_attempt(groups, credit):
    """[group][attempt] -> that attempt's one advantage, having checked that all its tokens carry it."""
    remaining = iter(credit)
    found = []
    for group in groups:
        found.append([])
        for trajectory in group.trajectories:
            values = np.concatenate([next(remaining) for _ in trajectory.turns])
            assert len(set(values.tolist())) <= 1
            found[-1].append(values[0] if len(values) else None)
    assert next(remaining, None) is None
    return found


@pytest.mark.parametrize(("estimate", "obvious"), PAIRS)
@few
@given(groups=group_lists())
def test_estimators_equal_their_definition_on_every_token(estimate, obvious, groups):
    if estimate is reinforce and not groups:
        return  # test_no_groups_give_no_credit
    credit = estimate(groups, {})
    assert [len(values) for values in credit] == [len(turn.action) for turn in turns_of(groups)]
    assert all(values.dtype == np.float64 for values in credit)
    step = [trajectory.total for group in groups for trajectory in group.trajectories]
    for group, found in zip(groups, by_attempt(groups, credit), strict=True):
        totals = [trajectory.total for trajectory in group.trajectories]
        for total, advantage in zip(totals, found, strict=True):
            if advantage is not None:
                assert advantage == pytest.approx(obvious(total, totals, step), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("total", [0.0, 0.1, 1.0 / 3.0, -0.7, 1e9 + 0.1])
@pytest.mark.parametrize("count", [2, 3, 7, 64])
@pytest.mark.parametrize("estimate", ESTIMATORS.values())
def test_equal_totals_give_exactly_zero(estimate, total, count):
    """Rounding of the mean once gave 0.056 to a group in which nothing differed."""
    groups = [make_group([total] * count), make_group([total] * (count - 1))]
    assert all((values == 0.0).all() for values in estimate(groups, {}))


@pytest.mark.parametrize("estimate", [grpo, dr_grpo, rloo])
def test_a_group_of_equal_totals_is_zero_next_to_others(estimate):
    credit = estimate([make_group([0.1] * 3), make_group([0.0, 1.0])], {})
    assert [values.tolist() for values in credit[:3]] == [[0.0, 0.0]] * 3
    assert credit[3][0] < 0 < credit[4][0]


@pytest.mark.parametrize("estimate", [grpo, dr_grpo, rloo])
def test_a_lone_attempt_is_compared_with_nothing(estimate):
    lone, pair = make_group([5.0]), make_group([0.0, 2.0])
    credit = estimate([lone, pair], {})
    assert credit[0].tolist() == [0.0, 0.0]
    assert (credit[1] < 0).all()
    assert all(math.isfinite(value) for values in credit for value in values)


def test_reinforce_compares_a_lone_attempt_with_the_other_groups():
    credit = reinforce([make_group([5.0]), make_group([0.0, 2.0])], {})
    assert [values[0] for values in credit] == pytest.approx([4.0, -3.5, -0.5])


def test_reinforce_leaves_the_only_attempt_of_a_step_its_total():
    assert reinforce([make_group([5.0])], {})[0].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("estimate", ESTIMATORS.values())
def test_twelve_turns_count_once_next_to_one(estimate):
    """Statistics are over attempts: the number of turns changes the number of arrays and not one value."""
    long = estimate([make_group([1.0, 0.0, 0.0], num_turns=[12, 1, 1])], {})
    short = estimate([make_group([1.0, 0.0, 0.0], num_turns=[1, 1, 1])], {})
    assert len(long) == 14
    assert {values[0] for values in long[:12]} == {short[0][0]}
    assert [values[0] for values in long[12:]] == [values[0] for values in short[1:]]


def test_turn_rewards_count_like_the_outcome():
    paid_once = make_trajectory([(1, 1), (1, 1)], outcome=1.0)
    paid_by_turn = make_trajectory([(1, 1), (1, 1)], rewards=[0.25, 0.75])
    unpaid = make_trajectory([(1, 1)])
    credit = grpo([Group(Task("a", "b"), (paid_once, paid_by_turn, unpaid))], {})
    assert credit[0][0] == credit[1][0] == credit[2][0] == credit[3][0] > 0 > credit[4][0]


def test_failed_attempts_do_not_enter_the_statistics():
    group = make_group([1.0, 0.0])
    lost = make_trajectory([(1, 1)], outcome=100.0, status="failed")
    with_lost = Group(group.task, group.trajectories, (lost,))
    for estimate in ALL:
        for one, other in zip(estimate([group], {}), estimate([with_lost], {}), strict=True):
            assert one.tolist() == other.tolist()


@pytest.mark.parametrize("estimate", [*ALL, dr_grpo])
@few
@given(groups=group_lists(min_groups=1), data=st.data())
def test_the_order_of_groups_only_orders_the_credit(estimate, groups, data):
    order = data.draw(st.permutations(range(len(groups))))
    straight = by_attempt(groups, estimate(groups, {}))
    shuffled = by_attempt([groups[i] for i in order], estimate([groups[i] for i in order], {}))
    for place, group in enumerate(order):
        for one, other in zip(straight[group], shuffled[place], strict=True):
            assert one is other is None or one == pytest.approx(other, rel=1e-13, abs=1e-13)


def test_the_order_of_attempts_does_not_matter():
    for totals in permutations([0.0, 0.25, 1.0]):
        credit = grpo([make_group(totals)], {})
        assert sorted(values[0] for values in credit) == pytest.approx([-0.80064, -0.32025, 1.12089], abs=1e-4)


@pytest.mark.parametrize(
    "estimate",
    [
        grpo,
        rloo,
        pytest.param(reinforce),
        imitate,
    ],
)
def test_no_groups_give_no_credit(estimate):
    assert estimate([], {}) == []


def test_a_group_without_attempts_gives_none():
    for estimate in ALL:
        assert len(estimate([Group(Task("a", "b"), ()), make_group([0.0, 1.0])], {})) == 2


@few
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_centred_totals_have_no_mean(totals):
    found = centre(np.array(totals))
    assert abs(math.fsum(found)) <= 1e-9 * (1 + sum(map(abs, totals)))
    np.testing.assert_allclose(found - found[0], np.array(totals) - totals[0], atol=1e-9)
