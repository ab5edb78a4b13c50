import math

import pytest

from support.logged import run_of, seen_by


def test_updates_that_are_not_finite():
    assert "not finite" in seen_by("learning_rate", run_of(2, skipped=[0.0, 0.5]))
    assert seen_by("learning_rate", run_of(2, skipped=[0.5, 0.0])) is None


def test_ratios_far_from_one():
    assert "ratio" in seen_by("learning_rate", run_of(2, ratio=[1.3, 0.7]))
    assert seen_by("learning_rate", run_of(2, ratio=[1.3, 1.1])) is None
    assert seen_by("learning_rate", run_of(2, ratio=[1.3, 0.7]), "max_lag=2") is None


def test_success_that_falls():
    fallen = "fell from 0.50 before training to 0.00"
    assert fallen in seen_by("learning_rate", run_of(4, success=[0.1, 0, 0, 0], eval_tasks=128.0))
    assert seen_by("learning_rate", run_of(4, success=[0.1, 0, 0, 0])) is None
    assert f"{fallen} in the last 6 steps" in seen_by("learning_rate", run_of(7, success=[0.1, 0, 0, 0, 0, 0, 0]))
    many = {"groups_kept": 32.0, "eval_success": 0.1}
    seen = seen_by("learning_rate", run_of(9, success=[*[0.4] * 6, 0.05, 0.0, 0.05], **many))
    assert "from 0.40 in steps 1 to 6 to 0.03" in seen
    assert seen_by("learning_rate", run_of(9, success=[*[0.4] * 6, 0.25, 0.2, 0.25], **many)) is None


def test_success_that_falls_by_chance():
    """A few attempts at a hard task: 2 of 64 before, none now."""
    assert seen_by("learning_rate", run_of(4, success=[0.03, 0, 0, 0], eval_success=0.04)) is None


@pytest.mark.parametrize(
    ("cut", "fires"), [([0.0, 0.9, 0.9], True), ([0.0, 0.9, 0.7], False), ([0.9, 0.9, 0.9], False)]
)
def test_actions_that_stop_ending(cut, fires):
    seen = seen_by("learning_rate", run_of(3, stop_length=cut, reward_mean=0.0, success=0.0, eval_success=0.0))
    assert (seen is not None) is fires
    assert seen_by("learning_rate", run_of(6, stop_length=[0, 0, 0, *cut], reward_mean=[0, 0, 0, 1, 1, 1])) is None


def test_entropy_that_collapses_or_explodes():
    still = {"success": 0.1, "eval_success": 0.1}
    assert "went from 1 to 0.05" in seen_by("learning_rate", run_of(4, entropy=[1.0, 1.0, 0.1, 0.05], **still))
    assert seen_by("learning_rate", run_of(4, entropy=[1.0, 1.0, 0.2, 0.05], **still)) is None
    assert "went from 1 to 3" in seen_by("learning_rate", run_of(4, entropy=[1.0, 1.0, 3.0, 3.0], **still))
    assert seen_by("learning_rate", run_of(4, entropy=[1.0, 1.0, 0.1, 0.05], success=0.8)) is None
    learned = {"reward_mean": [0.1, 0.1, 0.1, 0.9, 0.9, 0.9], "success": 0.1, "eval_success": 0.1}
    assert seen_by("learning_rate", run_of(6, entropy=[1.0, 1.0, 0.5, 0.3, 0.05, 0.05], **learned)) is None


def test_an_entropy_bonus():
    rising = run_of(4, entropy=[1.0, 1.0, 1.5, 1.6])
    assert "entropy = 2" in seen_by("entropy_bonus", rising, "entropy=2.0")
    assert seen_by("entropy_bonus", rising) is None
    assert seen_by("entropy_bonus", run_of(4, entropy=[1.0, 1.0, 1.4, 1.6]), "entropy=2.0") is None


def test_clipping():
    assert "40%" in seen_by("clipping", run_of(3, clipped=0.4))
    assert seen_by("clipping", run_of(3, clipped=[0.4, 0.39, 0.4])) is None


def test_a_gap_between_engine_and_learner():
    assert "1.0e-04" in seen_by("gap", run_of(3, gap_mean=1e-4))
    assert seen_by("gap", run_of(3, gap_mean=[1e-4, 9e-5, 1e-4])) is None
    assert seen_by("gap", run_of(3, gap_mean=1e-2), "model.dtype=bfloat16") is None
    assert seen_by("gap", run_of(3, gap_mean=math.nan)) is None


def test_lag_that_costs():
    old = {"lag_mean": 1.5, "ratio": 1.25}
    assert "max_lag = 2" in seen_by("lag", run_of(3, **old), "max_lag=2")
    assert seen_by("lag", run_of(3, **old)) is None
    assert seen_by("lag", run_of(3, lag_mean=1.5, ratio=1.1), "max_lag=2") is None
    assert seen_by("lag", run_of(3, lag_mean=1.5, clipped=0.3), "max_lag=2") is not None
    assert seen_by("lag", run_of(3, lag_mean=0.9, ratio=1.25), "max_lag=2") is None


def test_samples_that_are_too_old():
    finished = ("max_lag=1", "schedule.order=finished")
    assert "too old" in seen_by("stale", run_of(3, lag_masked_turns=39.0), *finished)
    assert seen_by("stale", run_of(3, lag_masked_turns=38.0), *finished) is None
    assert seen_by("stale", run_of(3, lag_masked_turns=39.0), "max_lag=1") is None
    assert "12 of 36 groups" in seen_by("stale", run_of(3, groups_dropped=4.0), *finished)
    assert seen_by("stale", run_of(3, groups_dropped=4.0), *finished, "filter.name=dynamic_sampling") is None
