"""Where the policy decides how many turns there are, most baselines per turn are biased. Enumerated exactly."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credit.bias import gradient_ratios
from credit.stepping import slow_standardise
from support.making import make_trajectory
from turnwise.credit.temporal import turn_baseline
from turnwise.credit.totals import rloo
from turnwise.types import Group, Task, turns_of


def per_turn_index(compare):
    """An estimator that compares totals among the attempts that reached a turn, as `compare` says."""

    def estimate(groups, scores):
        credit = []
        for group in groups:
            reached = {}
            for i, trajectory in enumerate(group.trajectories):
                for k in range(len(trajectory.turns)):
                    reached.setdefault(k, []).append(i)
            totals = [trajectory.total for trajectory in group.trajectories]
            compared = {k: dict(zip(who, compare([totals[i] for i in who]), strict=True)) for k, who in reached.items()}
            for i, trajectory in enumerate(group.trajectories):
                credit.extend(np.full(len(turn.action), compared[k][i]) for k, turn in enumerate(trajectory.turns))
        return credit

    return estimate


z_score = per_turn_index(slow_standardise)
with_itself = per_turn_index(lambda totals: [total - sum(totals) / len(totals) for total in totals])


def enumerate_gradients(estimate, attempts, go_on, succeed, pays):
    """(expected, true) gradient in the logits of the two choices; `pays` for stopping, failing and succeeding."""
    endings = {(0,): 1 - go_on, (1, 0): go_on * (1 - succeed), (1, 1): go_on * succeed}
    pay = dict(zip(endings, pays, strict=True))
    made = {ending: make_trajectory([(1, 1)] * len(ending), outcome=pay[ending]) for ending in endings}
    slope = (go_on, succeed)
    expected = [0.0, 0.0]
    for chosen in product(endings, repeat=attempts):
        group = Group(Task("a", "b"), tuple(made[ending] for ending in chosen))
        credit = iter(estimate([group], {}))
        for ending in chosen:
            for k, choice in enumerate(ending):
                score = choice - slope[k]
                expected[k] += math.prod(endings[e] for e in chosen) * next(credit).item() * score / attempts
    true = [0.0, 0.0]
    for ending, chance in endings.items():
        for k, choice in enumerate(ending):
            true[k] += chance * pay[ending] * (choice - slope[k])
    return expected, true


chances = st.floats(0.05, 0.95)
amounts = st.floats(-2.0, 2.0)


@settings(max_examples=200, deadline=None)
@given(attempts=st.integers(1, 3), go_on=chances, succeed=chances, pays=st.tuples(amounts, amounts, amounts))
def test_the_expected_gradient_of_turn_baseline_is_the_true_one(attempts, go_on, succeed, pays):
    expected, true = enumerate_gradients(turn_baseline, attempts, go_on, succeed, pays)
    assert expected == pytest.approx(true, rel=0, abs=1e-12)


def test_a_z_score_per_turn_and_a_mean_with_itself_are_biased():
    for estimate, ratios in [(turn_baseline, (1, 1)), (with_itself, (0.667, 0.480)), (z_score, (2.3, 0.76))]:
        expected, true = enumerate_gradients(estimate, 3, 0.6, 0.7, (0.5, 0.0, 1.0))
        found = [one / other for one, other in zip(expected, true, strict=True)]
        assert found == pytest.approx(ratios, abs=0.01 if estimate is z_score else 1e-3)
        if estimate is not turn_baseline:
            assert all(abs(ratio - 1) > 0.2 for ratio in found)


@pytest.mark.parametrize(
    ("estimate", "ratios"), [(turn_baseline, (1, 1)), (with_itself, (2 / 3, 0.48)), (z_score, (2.3094, 0.7551))]
)
def test_the_diagnostic_finds_the_ratios(estimate, ratios):
    assert gradient_ratios(estimate) == pytest.approx(ratios, abs=1e-12 if estimate is not z_score else 1e-4)


@settings(max_examples=30, deadline=None)
@given(go_on=chances, succeed=chances, stopped=st.floats(-0.5, -0.1), attempts=st.integers(2, 3))
def test_the_diagnostic_equals_the_enumeration_for_any_numbers(go_on, succeed, stopped, attempts):
    numbers = {"attempts": attempts, "go_on": go_on, "succeed": succeed, "stopped": stopped, "failed": 0.25}
    for estimate in (z_score, with_itself, rloo):
        expected, true = enumerate_gradients(estimate, attempts, go_on, succeed, (stopped, 0.25, 1.0))
        by_hand = [one / other for one, other in zip(expected, true, strict=True)]
        assert gradient_ratios(estimate, **numbers) == pytest.approx(by_hand, rel=1e-9)


def test_the_diagnostic_shows_estimators_groups_of_whole_attempts():
    seen = []

    def look(groups, scores):
        seen.extend(tuple(t.total for t in group.trajectories) for group in groups)
        return [np.ones(len(turn.action)) for turn in turns_of(groups)]

    assert gradient_ratios(look, attempts=2) == pytest.approx((0.0, 0.0), abs=1e-12)
    assert sorted(seen) == sorted(product((0.0, 0.5, 1.0), repeat=2))
