import numpy as np
import pytest

from making import make_group, make_trajectory
from turnwise.config import parse_recipe
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.filters import FILTERS, WITHIN_GROUPS, keep_all, zero_variance
from turnwise.types import Group, Task


@pytest.mark.parametrize("totals", [[], [1.0], [1.0, 1.0], [0.0, 1.0]])
def test_keep_all_keeps_all(totals):
    assert keep_all(make_group(totals)) is True


@pytest.mark.parametrize(
    ("totals", "worth"),
    [
        ([], False),
        ([1.0], False),
        ([0.0, 0.0], False),
        ([1.0] * 5, False),
        ([1.0, 1.0, 0.0], True),
        ([0.0, 1e-9], True),
    ],
)
def test_zero_variance_keeps_groups_in_which_something_differs(totals, worth):
    assert zero_variance(make_group(totals)) is worth


def test_zero_variance_looks_at_totals_and_never_at_turns():
    """Elsewhere the rewards of turn rows differed within an attempt, and groups that all succeeded were kept."""
    early = make_trajectory([(1, 1), (1, 1)], rewards=[1.0, 0.0])
    late = make_trajectory([(1, 1), (1, 1), (1, 1)], rewards=[0.0, 0.0, 0.5], outcome=0.5)
    assert not zero_variance(Group(Task("a", "b"), (early, late)))


def test_zero_variance_does_not_see_failed_attempts():
    lost = make_trajectory([(1, 1)], outcome=-1.0, status="failed")
    group = make_group([1.0, 1.0])
    assert not zero_variance(Group(group.task, group.trajectories, (lost,)))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_within_groups_are_the_estimators_that_give_equal_totals_nothing(name):
    credit = ESTIMATORS[name]([make_group([1.0, 1.0]), make_group([0.0, 0.25])], {})
    assert (name in WITHIN_GROUPS) == (not np.concatenate(credit[:2]).any())
    assert np.concatenate(credit[2:]).any()


def test_within_groups_names_estimators():
    assert ESTIMATORS.keys() >= WITHIN_GROUPS


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("credit_name", ESTIMATORS)
def test_a_filter_that_would_drop_signal_is_refused(filter_name, credit_name):
    from turnwise.build import check

    tree = {"env": {"name": "hops"}, "filter": {"name": filter_name}, "credit": {"name": credit_name}}
    recipe = parse_recipe(tree, "test.toml")
    if filter_name == "zero_variance" and credit_name == "reinforce":
        with pytest.raises(ValueError, match="still carry signal for reinforce; use it with grpo or rloo"):
            check(recipe)
    else:
        check(recipe)
