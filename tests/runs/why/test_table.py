import string
from dataclasses import replace

import pytest

from support.logged import recipe_with, run_of
from turnwise.recipe.parse import section_at
from turnwise.runs.metric_names import metric_of
from turnwise.runs.why.check import KEYS
from turnwise.runs.why.history import MetricHistory
from turnwise.runs.why.table import CHECKS, find_causes, is_read


def causes(lines, *overrides):
    return [finding.name for finding in find_causes(MetricHistory.of(lines, is_read), recipe_with(*overrides))]


def test_a_healthy_run_has_no_finding():
    for steps in range(12):
        assert causes(run_of(steps)) == []


def test_an_empty_run_has_no_finding():
    assert causes([]) == []
    assert causes([{"step": 0}]) == []


def test_a_run_without_most_metrics_has_no_finding():
    assert causes([{"step": step, "groups/kept": 8.0} for step in range(1, 9)]) == []


@pytest.mark.parametrize("key", sorted(set(KEYS.values())))
def test_every_key_that_is_named_is_one_of_a_recipe(key):
    *above, name = key.split(".")
    assert name in section_at(above).model_fields


def test_every_key_is_used():
    named = {field for check in CHECKS for _, field, _, _ in string.Formatter().parse(check.remedy) if field}
    read = {"credit", "environments", "max_action_tokens", "max_turns", "dtype", "max_lag", "order", "stale"}
    assert named | read == set(KEYS)


def test_every_metric_that_is_read_is_one_of_a_run():
    names = [read + "x" if read.endswith("/") else read for check in CHECKS for read in check.reads]
    unknown = [name for name in names if metric_of(name.replace("tools/x", "tools/x/errors")) is None]
    assert not unknown


def test_names_and_causes_stand_once():
    assert len({check.name for check in CHECKS}) == len({check.cause for check in CHECKS}) == len(CHECKS)


def test_no_check_explains_itself_in_a_circle():
    explains = {check.name: set(check.explains) for check in CHECKS}
    assert not {name for names in explains.values() for name in names} - explains.keys()
    for name in explains:
        seen, front = set(), set(explains[name])
        while front:
            seen |= front
            front = set().union(*(explains[one] for one in front)) - seen
        assert name not in seen


def test_a_cause_hides_what_follows_from_it():
    cut = {"stop_length": 1.0, "reward_min": 0.0, "reward_max": 0.0, "eval_reward_max": 0.0, "eval_success": 0.0}
    flat = {"success": 0.0, "gradient_norm": 0.0, "groups_zero_variance": 8.0, "reward_mean": 0.0, "reward_std": 0.0}
    assert causes(run_of(6, **cut, **flat), "rollout.max_action_tokens=4") == ["token_limit"]


def test_a_check_that_fails_is_left_out():
    def broken(evidence):
        raise ZeroDivisionError

    checks = (replace(CHECKS[0], find=broken), *CHECKS[1:])
    history = MetricHistory.of(run_of(3, failure_rate=0.5), is_read)
    assert [finding.name for finding in find_causes(history, recipe_with(), checks)] == ["failures"]


def test_a_finding_says_what_to_try_with_the_key():
    (finding,) = find_causes(MetricHistory.of(run_of(3, stop_length=0.9, success=0.5), is_read), recipe_with())
    assert "rollout.max_action_tokens" in finding.remedy
    assert "\n" not in finding.line
    assert finding.to_json()["try"] == finding.remedy
    assert finding.step == 3
