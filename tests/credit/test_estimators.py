import inspect
import math
import statistics
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit.stepping import (
    assert_close,
    many,
    on_tokens,
    permuted,
    random_scores,
    random_step,
    seeds,
    slow_turn_returns,
)
from support.making import few, make_group, make_trajectory
from turnwise.credit.estimators import ESTIMATORS, Estimator
from turnwise.credit.teaching import imitate
from turnwise.credit.temporal import gigpo, reinforce_pp, reward_to_go, turn_baseline
from turnwise.credit.totals import centre, grpo, maxrl, reinforce, rloo
from turnwise.types import Group, Task, Trajectory, turns_of

BY_ATTEMPT = [grpo, rloo, maxrl, reinforce]
FUNCTIONS = [estimator.function for estimator in ESTIMATORS.values()]
UNSCORED = [estimator.function for estimator in ESTIMATORS.values() if not estimator.needs]
ALL = [*UNSCORED, imitate]
SCORES = ("old", "reference", "teacher", "values")


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


def obvious_maxrl(total, group, step):
    return (total - statistics.mean(group)) / (statistics.mean(group) + 1e-6)


def obvious_imitation(total, group, step):
    return 1.0


PAIRS = [
    (grpo, obvious_grpo),
    (dr_grpo, obvious_dr_grpo),
    (rloo, obvious_rloo),
    (maxrl, obvious_maxrl),
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
@many
@given(seed=seeds)
def test_estimators_equal_their_definition_on_every_token(estimate, obvious, seed):
    groups = random_step(seed, lowest=0.0 if estimate is maxrl else -1.0)
    step = [trajectory.total for group in groups for trajectory in group.trajectories]
    expected = []
    for group in groups:
        totals = [trajectory.total for trajectory in group.trajectories]
        advantages = [obvious(total, totals, step) for total in totals]
        expected.append(on_tokens(group, lambda i, k, advantages=advantages: advantages[i]))
    assert_close(groups, estimate(groups, {}), expected)


@pytest.mark.parametrize("total", [0.0, 0.1, 1.0 / 3.0, -0.7, 1e9 + 0.1])
@pytest.mark.parametrize("count", [2, 3, 7, 64])
@pytest.mark.parametrize("estimate", UNSCORED)
def test_equal_totals_give_exactly_zero(estimate, total, count):
    """Rounding of the mean once gave 0.056 to a group in which nothing differed."""
    if estimate is turn_baseline and count == 2:
        count = 3  # a lone attempt has nobody to be compared with and keeps its total
    if estimate is maxrl:
        total = abs(total)
    groups = [make_group([total] * count), make_group([total] * (count - 1))]
    assert all((values == 0.0).all() for values in estimate(groups, {}))


@pytest.mark.parametrize("estimate", [grpo, dr_grpo, rloo, maxrl, reward_to_go, turn_baseline, gigpo])
def test_a_group_of_equal_totals_is_zero_next_to_others(estimate):
    credit = estimate([make_group([0.1] * 3), make_group([0.0, 1.0])], {})
    assert [values.tolist() for values in credit[:3]] == [[0.0, 0.0]] * 3
    assert credit[3][0] < 0 < credit[4][0]


@pytest.mark.parametrize("estimate", [grpo, dr_grpo, rloo, maxrl, reward_to_go, gigpo])
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


def test_turn_baseline_leaves_a_lone_attempt_its_return():
    """A credit of 0 would take from the gradient what it has where nobody else got as far."""
    assert turn_baseline([make_group([5.0]), make_group([0.0, 2.0])], {})[0].tolist() == [5.0, 5.0]


def test_maxrl_divides_by_the_mean():
    credit = maxrl([make_group([0.0, 0.0, 0.0, 1.0])], {})
    assert [values[0] for values in credit] == pytest.approx([-1.0, -1.0, -1.0, 3.0], rel=1e-5)


def test_maxrl_refuses_a_negative_total_in_one_line():
    groups = [make_group([0.0, 1.0]), make_group([1.0, -0.25], name="sour")]
    with pytest.raises(ValueError, match=r"task sour has -0\.25; raise its rewards, or use credit grpo$") as error:
        maxrl(groups, {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("estimate", [*BY_ATTEMPT, dr_grpo, reward_to_go, turn_baseline])
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


def with_kl(groups, scores):
    return reinforce_pp(groups, scores, kl=0.5, gamma=0.9, baseline=True)


@pytest.mark.parametrize("estimate", [*FUNCTIONS, imitate, dr_grpo, with_kl])
@few
@given(seed=seeds, data=st.data())
def test_permuting_groups_permutes_credit(estimate, seed, data):
    groups = random_step(seed, lowest=0.0, min_groups=2)
    scores = random_scores(groups, seed)
    order = data.draw(st.permutations(range(len(groups))))
    shuffled, expected = permuted(groups, order, estimate(groups, scores))
    moved = {}
    for name, arrays in scores.items():
        _, moved[name] = permuted(groups, order, [values.astype(np.float64) for values in arrays])
    for one, other in zip(estimate(shuffled, moved), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_the_order_of_attempts_does_not_matter():
    for totals in permutations([0.0, 0.25, 1.0]):
        credit = grpo([make_group(totals)], {})
        assert sorted(values[0] for values in credit) == pytest.approx([-0.80064, -0.32025, 1.12089], abs=1e-4)


@pytest.mark.parametrize("estimate", [*FUNCTIONS, imitate])
def test_no_groups_give_no_credit(estimate):
    assert estimate([], {}) == []


@pytest.mark.parametrize("estimate", [*FUNCTIONS, imitate])
def test_turns_without_tokens_get_empty_credit(estimate):
    groups = [Group(Task("a", "b"), (make_trajectory([(1, 0), (1, 0)], outcome=1.0),)), Group(Task("a", "b"), ())]
    credit = estimate(groups, random_scores(groups))
    assert [(len(values), values.dtype) for values in credit] == [(0, np.float64)] * 2


def test_a_group_without_attempts_gives_none():
    for estimate in ALL:
        assert len(estimate([Group(Task("a", "b"), ()), make_group([0.0, 1.0])], {})) == 2


@few
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_centred_totals_have_no_mean(totals):
    found = centre(np.array(totals))
    assert abs(math.fsum(found)) <= 1e-9 * (1 + sum(map(abs, totals)))
    np.testing.assert_allclose(found - found[0], np.array(totals) - totals[0], atol=1e-9)


@few
@given(seed=seeds)
def test_an_estimate_changes_nothing_it_was_given(seed):
    groups = random_step(seed, lowest=0.0)
    scores = random_scores(groups, seed)
    before = {name: [values.copy() for values in arrays] for name, arrays in scores.items()}
    totals = [[trajectory.total for trajectory in group.trajectories] for group in groups]
    for estimate in FUNCTIONS:
        first = [values.copy() for values in estimate(groups, scores)]
        assert all(map(np.array_equal, first, estimate(groups, scores)))
    for name, arrays in scores.items():
        assert all(map(np.array_equal, arrays, before[name]))
    assert totals == [[trajectory.total for trajectory in group.trajectories] for group in groups]


@few
@given(seed=seeds)
def test_undiscounted_reward_to_go_is_dr_grpo_where_only_outcomes_pay(seed):
    """Two roads to one number: the pay from every turn on is then the total."""
    groups = [
        Group(
            group.task,
            tuple(
                make_trajectory([(1, len(turn.action)) for turn in t.turns], outcome=t.outcome)
                for t in group.trajectories
            ),
        )
        for group in random_step(seed)
    ]
    assert all(set(slow_turn_returns(t, 1.0).values()) <= {t.total} for group in groups for t in group.trajectories)
    for one, other in zip(reward_to_go(groups, {}), dr_grpo(groups, {}), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_runs_on_what_it_needs_and_on_nothing_less(name):
    groups = [make_group([0.0, 1.0], num_turns=[2, 1])]
    scores = random_scores(groups)
    settings = {"kl": 0.1} if name == "reinforce_pp" else {}
    needed = ESTIMATORS[name].needs | ({"reference"} if settings else set())
    ESTIMATORS[name].function(groups, {score: scores[score] for score in needed}, **settings)
    for missing in needed:
        rest = {score: values for score, values in scores.items() if score != missing}
        with pytest.raises(ValueError, match=rf'^credit {name}.* needs scores\["{missing}"\]') as error:
            ESTIMATORS[name].function(groups, rest, **settings)
        assert "\n" not in str(error.value)


def test_needs():
    needed = {name: set(estimator.needs) for name, estimator in ESTIMATORS.items()}
    assert {name: scores for name, scores in needed.items() if scores} == {"gae": {"values"}, "distill": {"teacher"}}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_by_token_are_those_that_take_a_kl_penalty_themselves(name):
    assert ESTIMATORS[name].by_token == ("kl" in inspect.signature(ESTIMATORS[name].function).parameters)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_that_take_no_negative_totals_refuse_them(name):
    groups = [make_group([-1.0, 1.0])]
    if ESTIMATORS[name].takes_negative_totals:
        ESTIMATORS[name].function(groups, random_scores(groups))
    else:
        with pytest.raises(ValueError, match=f"credit {name} needs totals of 0 or more"):
            ESTIMATORS[name].function(groups, random_scores(groups))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_that_are_always_zero_give_no_credit(name):
    groups = [make_group([0.0, 1.0]), make_group([0.25, 0.5])]
    credit = np.concatenate(ESTIMATORS[name].function(groups, random_scores(groups)))
    assert ESTIMATORS[name].always_zero == (not credit.any())


def test_a_record_cannot_need_an_unknown_score():
    with pytest.raises(ValueError, match="no model scores judge; known: old, reference, teacher, values"):
        Estimator(grpo, needs=frozenset({"judge"}))
    with pytest.raises(ValueError, match='has critic_targets if it needs "values"'):
        Estimator(grpo, needs=frozenset({"values"}))
    with pytest.raises(ValueError, match='has critic_targets if it needs "values"'):
        Estimator(grpo, critic_targets=grpo)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_that_compare_attempts_are_those_that_look_at_the_group_and_at_it_alone(name):
    """Another group changes nothing; another attempt of the group does."""

    def credit(*groups):
        scores = {score: [np.full(len(turn.action), -0.5) for turn in turns_of(groups)] for score in SCORES}
        return np.concatenate(ESTIMATORS[name].function(groups, scores)[:3]).tolist()

    group, other = make_group([0.0, 1.0, 1.0]), make_group([4.0, 2.0])
    more = Group(group.task, (*group.trajectories, Trajectory(group.trajectories[0].turns, "finished", 0.5)))
    compares = credit(group, other) == credit(group) != credit(more)
    assert compares == ESTIMATORS[name].compares_attempts


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_goes_by_its_own_name(name):
    assert ESTIMATORS[name].function.__name__ == name
