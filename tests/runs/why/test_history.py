import math

import numpy as np

from turnwise.runs.why.history import Columns, MetricHistory, mean


def columns(*lines):
    made = Columns(lambda name: name != "unread")
    for line in lines:
        made.append(line)
    return made


def test_a_metric_that_comes_late_or_goes_is_nan_where_it_lacks():
    made = columns({"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 5.0}, {"step": 3, "b": 6.0}, {"step": 4})
    assert np.array_equal(made.all("a"), [1, 2, math.nan, math.nan], equal_nan=True)
    assert np.array_equal(made.all("b"), [math.nan, 5, 6, math.nan], equal_nan=True)
    assert np.array_equal(made.last("b", 2), [6, math.nan], equal_nan=True)
    assert np.array_equal(made.last("b", 9), made.all("b"), equal_nan=True)
    assert np.isnan(made.all("never")).all()
    assert math.isnan(made.latest("a"))
    assert made.steps == [1, 2, 3, 4]


def test_what_no_check_reads_is_not_kept():
    assert "unread" not in columns({"step": 1, "unread": 1.0, "read": 1.0}).values


def test_values_that_are_no_numbers_are_left_out():
    hostile = {"step": 1, "a": "high", "b": [1], "c": True, "d": None, "e": 10**400, "f": math.inf, "g": math.nan}
    made = columns(hostile)
    assert all(math.isnan(made.latest(name)) for name in hostile if name != "step")


def test_training_steps_and_evaluations_are_apart():
    history = MetricHistory.of(
        [
            {"step": 0, "eval/sampled/success": 0.1},
            {"step": 1, "groups/kept": 8},
            {"step": 2, "groups/kept": 8, "eval/sampled/success": 0.2},
            {"step": 2, "eval/sampled/success": 0.3},
        ],
        lambda name: True,
    )
    assert (history.training.steps, history.evaluations.steps, history.step) == ([1, 2], [0, 2, 2], 2)


def test_an_empty_history_has_nothing():
    history = MetricHistory.of([], lambda name: True)
    assert history.step == 0
    assert len(history.training.last("success", 3)) == 0
    assert math.isnan(history.training.latest("success"))


def test_names_under_a_prefix():
    assert columns({"step": 1, "tools/get/errors": 1, "other": 2}).under("tools/") == {"get/errors": "tools/get/errors"}


def test_the_mean_is_over_what_is_known():
    assert mean(np.array([1.0, math.nan, 3.0])) == 2.0
    assert math.isnan(mean(np.array([math.nan])))
