import pytest
from pydantic import ValidationError

from turnwise.recipe.parse import parse_recipe
from turnwise.recipe.schedule import GuardsConfig, ScheduleConfig


def parse(**tree):
    return parse_recipe({"env": [{"name": "hops"}], **tree}, "test")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"schedule": {"stale": "mask_turn"}}, 'schedule: stale is ignored with order = "started"'),
        ({"schedule": {"order": "finished"}}, 'schedule.order = "finished" is ignored with max_lag = 0'),
        ({"schedule": {"order": "due"}}, 'schedule.order = "due" is ignored with max_lag = 0'),
        ({"max_lag": 2, "schedule": {"order": "due", "stale": "mask_turn"}}, 'stale is ignored with order = "due"'),
        (
            {"max_lag": 2, "schedule": {"mean_lag": 1.0}},
            'mean_lag is ignored with order = "started"; set order = "due"',
        ),
        (
            {"max_lag": 2, "schedule": {"order": "due", "mean_lag": 2.5}},
            "schedule.mean_lag = 2.5 is more than max_lag = 2, which no group may exceed; lower it, or raise max_lag",
        ),
        (
            {"schedule": {"overlap_evaluations": True}, "engine": {"name": "vllm", "vllm": {"servers": ["http://x"]}}},
            "engine.vllm.servers have one version of them; set schedule.overlap_evaluations = false",
        ),
    ],
)
def test_a_schedule_that_would_be_ignored_is_refused(tree, message):
    with pytest.raises(ValueError, match="^test: ") as caught:
        parse(**tree)
    assert message in str(caught.value)


def test_a_schedule_is_taken_as_it_is_written():
    schedule = parse(max_lag=2, schedule={"order": "finished", "stale": "mask_turn"}).schedule
    assert (schedule.order, schedule.stale) == ("finished", "mask_turn")
    assert parse().schedule == ScheduleConfig()


@pytest.mark.parametrize(
    ("max_lag", "schedule", "slots"),
    [
        (0, {}, 8),
        (2, {}, 24),
        (2, {"order": "finished"}, 24),
        (2, {"order": "due"}, 16),
        (3, {"order": "due"}, 20),
        (4, {"order": "due", "mean_lag": 1.1}, 17),
        (4, {"order": "due", "mean_lag": 4}, 40),
    ],
)
def test_slots_follow_from_the_lag(max_lag, schedule, slots):
    assert parse(max_lag=max_lag, groups_per_step=8, schedule=schedule).lag_slots == slots


@pytest.mark.parametrize(
    "settings", [{"max_nonfinite_updates": 0}, {"max_dropped_groups": 0}, {"max_logprob_gap": -1.0}]
)
def test_a_guard_that_would_stop_every_run_is_refused(settings):
    with pytest.raises(ValidationError):
        GuardsConfig(**settings)
