import math

import pytest

from support.logged import run_of, seen_by


def test_first_prompts_that_do_not_fit():
    lines = run_of(1, status_prompt_too_long=13.0, trajectory_count=51.0, trajectory_failed=13.0)
    lines[-1]["turn/prompt_tokens_refused"] = 212.0
    seen = seen_by("prompt_too_long", lines, "rollout.max_prompt_tokens=100")
    assert "20% of the attempts of the last step" in seen
    assert "rollout.max_prompt_tokens = 100" in seen
    assert "212 tokens" in seen
    fewer = run_of(1, status_prompt_too_long=12.0, trajectory_count=52.0, trajectory_failed=12.0)
    assert seen_by("prompt_too_long", fewer) is None


def test_first_prompts_that_do_not_fit_in_an_evaluation():
    lines = run_of(0, eval_status_prompt_too_long=64.0, eval_trajectory_failed=64.0, eval_trajectory_count=0.0)
    assert "100% of the attempts of the last evaluation" in seen_by("prompt_too_long", lines)


def test_conversations_that_outgrow_their_limit():
    assert "rollout.max_trajectory_tokens" in seen_by("conversation_too_long", run_of(3, status_too_long=32.0))
    assert seen_by("conversation_too_long", run_of(3, status_too_long=[32.0, 31.0, 32.0])) is None
    assert seen_by("conversation_too_long", run_of(2, status_too_long=64.0)) is None


def test_prompts_that_repeat():
    assert "100%" in seen_by("not_shown", run_of(2, prefix_repeated=1.0))
    assert seen_by("not_shown", run_of(2, prefix_repeated=[1.0, 0.49])) is None
    assert seen_by("not_shown", run_of(1, prefix_repeated=1.0)) is None
    assert seen_by("not_shown", run_of(2, prefix_repeated=math.nan)) is None


def test_ends_that_are_missed():
    assert "control token" in seen_by("no_end", run_of(2, stop_length=0.8, stop_missed_end=0.4))
    assert seen_by("no_end", run_of(2, stop_length=0.8, stop_missed_end=0.39)) is None
    assert seen_by("no_end", run_of(2, stop_length=0.49, stop_missed_end=0.49)) is None


def test_ends_that_never_come_though_there_is_room():
    lines = run_of(2, stop_length=1.0)
    assert "next to none" in seen_by("no_end", lines, "rollout.max_action_tokens=64")
    assert seen_by("no_end", lines, "rollout.max_action_tokens=63") is None


def test_actions_that_are_cut_off():
    assert "rollout.max_action_tokens = 7" in seen_by(
        "token_limit", run_of(3, stop_length=0.5), "rollout.max_action_tokens=7"
    )
    assert seen_by("token_limit", run_of(3, stop_length=[0.9, 0.9, 0.49])) is None


def test_attempts_that_run_out_of_turns():
    assert "rollout.max_turns = 8" in seen_by("turn_limit", run_of(5, status_too_many_turns=61.0, reward_std=0.0))
    assert seen_by("turn_limit", run_of(5, status_too_many_turns=61.0, reward_std=0.1)) is None
    assert seen_by("turn_limit", run_of(5, status_too_many_turns=60.0, reward_std=0.0)) is None


@pytest.mark.parametrize(
    ("shares", "fires"),
    [([0.3] * 5, True), ([0.29] * 5, False), ([0.9, 0.8, 0.7, 0.7, 0.7], False), ([0.5, 0.6, 0.5, 0.5, 0.5], True)],
)
def test_faults_that_do_not_fall(shares, fires):
    assert (seen_by("faults", run_of(5, turn_faults=shares)) is not None) is fires


def test_a_tool_that_raises():
    lines = run_of(3)
    for line in lines[1:]:
        line["tools/get/errors"] = 32.0
    assert "the tool get raised 96 errors in the 192 attempts" in seen_by("tool_errors", lines)
    lines[2]["tools/get/errors"] = 31.0
    assert seen_by("tool_errors", lines) is None


def test_attempts_that_fail():
    assert "25%" in seen_by("failures", run_of(3, failure_rate=0.25))
    assert seen_by("failures", run_of(9, failure_rate=0.05)) is None
    assert seen_by("failures", run_of(3, failure_rate=[0.9, 0.9, 0.1])) is None
