import numpy as np
import pytest

from credit.stepping import random_scores
from support.making import make_group, make_trajectory
from turnwise.credit.estimators import ESTIMATORS, needs
from turnwise.credit.filters import FILTERS, WITHIN_GROUPS, keep_all, zero_variance
from turnwise.recipe.parse import parse_recipe
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


def same_totals_by_other_roads():
    """Two attempts of total 1, paid at different turns, the second longer."""
    early = make_trajectory([(1, 1), (1, 1)], rewards=[1.0, 0.0])
    late = make_trajectory([(1, 1), (1, 1), (1, 1)], rewards=[0.0, 0.0, 0.5], outcome=0.5)
    return Group(Task("a", "b"), (early, late))


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"none"}))
def test_within_groups_are_the_estimators_that_give_equal_totals_nothing(name):
    groups = [same_totals_by_other_roads(), make_group([0.0, 0.25])]
    credit = ESTIMATORS[name](groups, random_scores(groups))
    assert (name in WITHIN_GROUPS) == (not np.concatenate(credit[:5]).any())
    assert np.concatenate(credit[5:]).any()


def test_within_groups_names_estimators():
    assert ESTIMATORS.keys() >= WITHIN_GROUPS


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("credit_name", ESTIMATORS)
def test_a_filter_that_would_drop_signal_is_refused(filter_name, credit_name):
    from turnwise.assemble.checks import check

    tree = {"env": {"name": "hops"}, "filter": {"name": filter_name}, "credit": {"name": credit_name}}
    recipe = parse_recipe(tree, "test.toml")
    if filter_name == "zero_variance" and credit_name not in ("grpo", "rloo", "maxrl"):
        with pytest.raises(
            ValueError, match=f"still carry signal for {credit_name}; use it with grpo or maxrl or rloo"
        ):
            check(recipe)
    elif not needs(credit_name, {}) and credit_name != "none":
        check(recipe)
