"""Pay as large as an environment may give, and groups of one, under every estimator."""

import numpy as np
import pytest

from support.making import make_trajectory
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.failure import pay
from turnwise.envs.base import Reply
from turnwise.runs.describe import describe
from turnwise.types import LARGEST_PAY, Group, Task, turns_of


def group(*attempts):
    return Group(Task("a", "test"), attempts)


def attempt(outcome, rewards=(0.0, 0.0), seed=0):
    return make_trajectory([(2, 2)] * len(rewards), outcome=outcome, rewards=rewards, seed=seed)


def credit_of(name, groups):
    like = [np.zeros(len(turn.action), np.float32) for turn in turns_of(groups)]
    return ESTIMATORS[name].function(groups, {"values": like, "teacher": like, "old": like})


@pytest.mark.parametrize("value", [1e308, -1e308, 1e31, 10**400, float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["reward", "outcome"])
def test_pay_beyond_the_limit_is_refused_at_the_border(field, value):
    with pytest.raises(ValueError, match="finite numbers up to 1e\\+30"):
        Reply(**{field: value})
    assert getattr(Reply(**{field: LARGEST_PAY}), field) == LARGEST_PAY


def test_a_penalty_beyond_the_limit_is_refused():
    with pytest.raises(ValueError, match="value must be a finite number up to 1e\\+30"):
        pay(group(attempt(0.0)), value=1e308)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("signs", [(1, 1, 1, 1), (1, -1, 1, -1), (1, 0, 0, 0)])
def test_credit_and_metrics_of_the_largest_pay_are_finite(name, signs):
    if not ESTIMATORS[name].takes_negative_totals and -1 in signs:
        pytest.skip("for totals of 0 or more")
    attempts = [attempt(sign * LARGEST_PAY, seed=place) for place, sign in enumerate(signs)]
    groups = [group(*attempts), group(*attempts)]
    assert all(np.isfinite(credit.astype(np.float32)).all() for credit in credit_of(name, groups))
    metrics = describe(groups, [], version=0, success_at=1.0)
    assert all(np.isfinite(metrics[f"reward/{name}"]) for name in ("mean", "std", "min", "max"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("grpo", (0.0, 0.0)),
        ("rloo", (0.0, 0.0)),
        ("maxrl", (0.0, 0.0)),
        ("reward_to_go", (0.0, -0.25)),
        ("turn_baseline", (1.25, 1.0)),
    ],
)
def test_what_a_group_of_one_gets(name, wanted):
    """Paid 0.25 in its first turn and 1 at the end."""
    credit = credit_of(name, [group(attempt(1.0, (0.25, 0.0)))])
    assert [set(of_turn) for of_turn in credit] == [{value} for value in wanted]
