import math

import pytest

from support.logged import EVALUATED, run_of, seen_by

ZERO = {"reward_min": 0.0, "reward_max": 0.0, "eval_reward_max": 0.0}


def test_a_reward_that_never_differs():
    assert "all 256 attempts of 4 steps were paid exactly 0." in seen_by("constant_reward", run_of(4, **ZERO))
    assert seen_by("constant_reward", run_of(3, **ZERO)) is None
    assert seen_by("constant_reward", run_of(4, **ZERO, trajectory_count=15.0)) is None


def test_a_reward_that_once_differed_is_no_constant():
    """A run that has solved its tasks is paid alike too."""
    solved = run_of(9, reward_min=[0.0, *[1.0] * 8], reward_max=1.0, eval_reward_min=1.0)
    assert seen_by("constant_reward", solved) is None
    evaluated = run_of(4, reward_min=1.0, reward_max=1.0, eval_reward_min=0.0)
    assert seen_by("constant_reward", evaluated) is None


def test_a_run_that_stopped_because_no_group_was_kept():
    assert seen_by("constant_reward", run_of(1, **ZERO, groups_kept=0.0)) is not None


def test_a_constant_matters_only_where_rewards_are_read():
    assert seen_by("constant_reward", run_of(4, **ZERO), "credit.name=none") is None


def test_groups_that_are_all_paid_alike():
    equal = {"gradient_norm": 0.0, "groups_zero_variance": 8.0}
    assert "all 40 groups" in seen_by("equal_groups", run_of(5, **equal))
    assert seen_by("equal_groups", run_of(4, **equal)) is None
    assert seen_by("equal_groups", run_of(5, **equal, success=0.9)) is None
    assert seen_by("equal_groups", run_of(5, gradient_norm=0.0)) is None
    assert seen_by("equal_groups", run_of(5, groups_zero_variance=8.0)) is None


@pytest.mark.parametrize(
    ("temperature", "identical", "equal", "fires"),
    [
        (0.01, 4.0, 2.0, True),
        (0.01, 3.0, 2.0, False),
        (0.01, 0.0, 8.0, True),
        (0.3, 8.0, 8.0, True),
        (0.4, 8, 8, False),
    ],
)
def test_a_low_temperature(temperature, identical, equal, fires):
    lines = run_of(3, groups_identical=identical, groups_zero_variance=equal)
    seen = seen_by("low_temperature", lines, f"sampling.temperature={temperature}")
    assert (seen is not None) is fires


@pytest.mark.parametrize(("held_out", "fires"), [(0.5, True), (0.9, False), (math.nan, False)])
def test_a_low_temperature_may_look_solved(held_out, fires):
    """Greedy attempts succeed where sampled ones do not."""
    lines = run_of(3, groups_identical=8.0, groups_zero_variance=8.0, success=1.0, eval_success=held_out)
    assert (seen_by("low_temperature", lines, "sampling.temperature=0.1") is not None) is fires


def test_a_filter_that_drops_nearly_everything():
    assert "96 of 120 groups" in seen_by("filter", run_of(3, groups_dropped=32.0), "filter.name=dynamic_sampling")
    assert seen_by("filter", run_of(3, groups_dropped=31.0), "filter.name=dynamic_sampling") is None
    assert seen_by("filter", run_of(3, groups_dropped=32.0)) is None
    stopped = run_of(1, groups_kept=0.0, groups_dropped=512.0)
    assert "before the run stopped" in seen_by("filter", stopped, "filter.name=dynamic_sampling")


def with_datasets(first, second):
    lines = run_of(5)
    for line in lines[1:]:
        line |= {"groups/kept/a": first, "groups/kept/b": second}
    return lines


TWO = ("env=[{name='hops', dataset='a'}, {name='hops', dataset='b'}]",)


def test_a_dataset_that_starves():
    assert "b has 0 of the 40 groups" in seen_by("starved_dataset", with_datasets(8.0, 0.0), *TWO)
    assert seen_by("starved_dataset", with_datasets(7.0, 1.0), *TWO) is None
    weighted = ("env=[{name='hops', dataset='a', weight=99}, {name='hops', dataset='b'}]",)
    assert seen_by("starved_dataset", with_datasets(8.0, 0.0), *weighted) is None, "it is not due a group yet"


def test_steps_with_one_dataset_each_starve_nobody():
    assert seen_by("starved_dataset", run_of(9, groups_kept=1.0), *TWO) is None


def evaluated(lines, success, version):
    lines[-1] |= EVALUATED | {"eval/sampled/success": success, "eval/sampled/success_high": success + 0.1}
    lines[-1]["eval/sampled/version"] = version
    return lines


def test_few_tasks():
    few = {"tasks_distinct": 16.0, "tasks_epochs": 4.0}
    assert "16 training tasks" in seen_by("few_tasks", run_of(3, **few))
    assert seen_by("few_tasks", run_of(3, **few | {"tasks_distinct": 17.0})) is None
    assert seen_by("few_tasks", run_of(3, **few | {"tasks_epochs": 3.9})) is None
    assert "0.39 on held-out" in seen_by("few_tasks", evaluated(run_of(3, **few), 0.39, 3.0))
    assert seen_by("few_tasks", evaluated(run_of(3, **few), 0.45, 3.0)) is None


def test_overfitting():
    rising = [0.1] * 5 + [0.8] * 5
    lines = evaluated(run_of(10, success=rising, eval_success=0.1), 0.15, 10.0)
    assert "rose from 0.10 to 0.80" in seen_by("overfitting", lines)
    assert seen_by("overfitting", evaluated(run_of(10, success=rising, eval_success=0.1), 0.6, 10.0)) is None
    assert seen_by("overfitting", evaluated(run_of(10, success=0.8, eval_success=0.1), 0.15, 10.0)) is None
    assert seen_by("overfitting", run_of(10, success=rising, eval_success=0.1)) is None
    late = evaluated(run_of(10, success=rising, eval_success=0.1), math.nan, 10.0)
    assert seen_by("overfitting", late) is None
