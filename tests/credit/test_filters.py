import numpy as np
import pytest

from credit.stepping import random_scores
from support.making import make_group, make_trajectory
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.filters import FILTERS, has_signal, keep_all
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
def test_has_signal_keeps_groups_in_which_something_differs(totals, worth):
    assert has_signal(make_group(totals)) is worth


def test_has_signal_looks_at_totals_and_never_at_turns():
    """Elsewhere the rewards of turn rows differed within an attempt, and groups that all succeeded were kept."""
    early = make_trajectory([(1, 1), (1, 1)], rewards=[1.0, 0.0])
    late = make_trajectory([(1, 1), (1, 1), (1, 1)], rewards=[0.0, 0.0, 0.5], outcome=0.5)
    assert not has_signal(Group(Task("a", "b"), (early, late)))


def test_has_signal_does_not_see_failed_attempts():
    lost = make_trajectory([(1, 1)], outcome=-1.0, status="failed")
    group = make_group([1.0, 1.0])
    assert not has_signal(Group(group.task, group.trajectories, (lost,)))


def same_totals_by_other_roads():
    """Two attempts of total 1, paid at different turns, the second longer."""
    early = make_trajectory([(1, 1), (1, 1)], rewards=[1.0, 0.0])
    late = make_trajectory([(1, 1), (1, 1), (1, 1)], rewards=[0.0, 0.0, 0.5], outcome=0.5)
    return Group(Task("a", "b"), (early, late))


@pytest.mark.parametrize("name", sorted(name for name in ESTIMATORS if not ESTIMATORS[name].always_zero))
def test_the_record_says_which_estimators_give_equal_totals_no_credit(name):
    groups = [same_totals_by_other_roads(), make_group([0.0, 0.25])]
    credit = ESTIMATORS[name].function(groups, random_scores(groups))
    assert ESTIMATORS[name].zero_for_equal_totals == (not np.concatenate(credit[:5]).any())
    assert np.concatenate(credit[5:]).any()


def test_only_one_filter_drops_equal_totals():
    groups = [make_group([1.0, 1.0]), make_group([0.0, 1.0])]
    for name, record in FILTERS.items():
        assert [record.function(group) for group in groups] == [not record.drops_equal_totals, True], name
    assert [name for name, record in FILTERS.items() if record.drops_equal_totals] == ["dynamic_sampling"]


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("credit_name", ESTIMATORS)
def test_a_filter_that_would_drop_signal_is_refused(filter_name, credit_name):
    from turnwise.assemble.checks import check

    tree = {"env": {"name": "hops"}, "filter": {"name": filter_name}, "credit": {"name": credit_name}}
    recipe = parse_recipe(tree, "test.toml")
    if filter_name == "dynamic_sampling" and credit_name not in ("grpo", "rloo", "maxrl"):
        with pytest.raises(
            ValueError, match=f"still carry signal for {credit_name}; use it with grpo or maxrl or rloo"
        ):
            check(recipe)
    elif not ESTIMATORS[credit_name].needs and not ESTIMATORS[credit_name].always_zero:
        check(recipe)
