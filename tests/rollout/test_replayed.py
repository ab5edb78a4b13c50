"""A recorded attempt played again through an environment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.acting import TASK, Puppet, attempted, hang, limits, renderer, run, says, user
from turnwise.engines.base import Sampling
from turnwise.envs.base import Reply
from turnwise.messages import Message
from turnwise.rollout.attempt import run_attempt
from turnwise.rollout.replayed import ReplayedAttempt
from turnwise.rollout.scene import Attempt, Scene
from turnwise.types import Status, Trajectory


def recorded(*replies, **bounds):
    """An attempt in which the model says hello every turn."""
    return run(attempted(Puppet(*replies), **bounds))


def replay(trajectory, environment, is_opening=None, **bounds):
    """(the attempt as it is paid now, where it would have differed)."""
    render = renderer()
    replayed = ReplayedAttempt(trajectory, *([is_opening] if is_opening else []))

    def nobody(*_):
        raise AssertionError("nothing is sampled")

    scene = Scene(says(nobody, render=render), render, Sampling(200), limits(**bounds))
    found = run(run_attempt(Attempt(0, "rescore", TASK), lambda: environment, scene, replayed))
    return found, replayed.difference


TWO = (Reply(user("more"), reward=0.5), Reply(finished=True, outcome=1.0))


def test_the_same_environment_pays_the_same_and_hears_what_was_said():
    before, environment = recorded(*TWO), Puppet(*TWO)
    after, difference = replay(before, environment)
    assert environment.heard == ["hello", "hello"]
    assert environment.closed == 1
    assert (after.total, after.status, difference) == (1.5, Status.finished, "")
    for one, other in zip(before.turns, after.turns, strict=True):
        for name in ("prompt", "action", "logprobs", "versions"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()


def test_new_rewards_marks_and_a_late_outcome_count():
    paid = Puppet(Reply(user("more"), reward=2.0), Reply(finished=True, marks={"ok": 1.0}), closing=Reply(outcome=4.0))
    after, difference = replay(recorded(*TWO), paid)
    assert [turn.reward for turn in after.turns] == [2.0, 0.0]
    assert (after.total, dict(after.marks), difference) == (6.0, {"ok": 1.0}, "")


def test_another_answer_is_a_difference_but_the_last_one_is_not():
    _, difference = replay(recorded(*TWO), Puppet(Reply(user("else")), TWO[1]))
    assert difference == "turn 1 was answered otherwise"
    _, difference = replay(recorded(*TWO), Puppet(TWO[0], Reply(user("bye"), finished=True)))
    assert difference == ""


def test_an_earlier_end_leaves_the_rest_unsaid():
    environment = Puppet(Reply(finished=True, outcome=3.0))
    after, difference = replay(recorded(*TWO), environment)
    assert environment.heard == ["hello"]
    assert (len(after.turns), after.total, after.status) == (1, 3.0, Status.finished)
    assert difference == "turn 1 of 2 finished it"


def test_an_end_that_does_not_come_cuts_the_attempt_short():
    after, difference = replay(recorded(*TWO), Puppet(TWO[0], Reply(user("go on"), reward=0.25)))
    assert (after.total, after.status) == (0.75, Status.too_many_turns)
    assert difference == "turn 2 did not finish it"


def test_an_attempt_that_a_limit_ended_stays_one():
    before = recorded(max_turns=2)
    after, difference = replay(before, Puppet(Reply(user("on"), reward=1.0)))
    assert (before.status, after.status, after.total, difference) == (*[Status.too_many_turns] * 2, 1.0, "")


def test_an_opening_that_was_not_recorded_is_a_difference():
    seen = []

    def is_opening(trajectory, messages):
        seen.append([message.content for message in messages])
        return False

    _, difference = replay(recorded(*TWO), Puppet(*TWO), is_opening)
    assert seen == [["go"]]
    assert difference == "the attempt opened otherwise"


@pytest.mark.parametrize(
    ("environment", "status", "text"),
    [
        (lambda: Puppet(RuntimeError("broken")), Status.failed, "broken"),
        (lambda: Puppet("no reply"), Status.failed, "must return a Reply"),
        (lambda: Puppet(*TWO, opening=ValueError("no such task")), Status.failed, "no such task"),
        (lambda: Puppet(hang), Status.timed_out, ""),
        (lambda: Puppet(*TWO, closing=OSError("full")), Status.failed, "full"),
    ],
)
def test_an_environment_that_misbehaves_costs_its_attempt(environment, status, text):
    after, _ = replay(recorded(*TWO), environment(), call_seconds=0.05)
    assert after.status is status
    assert text in after.failure


def test_what_broke_the_environment_keeps_its_turn():
    after, _ = replay(recorded(*TWO), Puppet(TWO[0], RuntimeError("broken")))
    assert len(after.turns) == 2
    assert after.turns[1].reward == 0.0


def test_a_failed_attempt_counts_once_the_environment_finishes_it_and_stays_failed_otherwise():
    before = recorded(TWO[0], RuntimeError("broken"))
    assert before.status is Status.failed
    after, _ = replay(before, Puppet(*TWO))
    assert (after.status, after.total) == (Status.finished, 1.5)
    after, _ = replay(before, Puppet(TWO[0]))
    assert after.status is Status.failed
    assert "StillFailed" in after.failure
    assert "broken" in after.failure


def test_a_message_with_a_fault_never_reaches_the_environment():
    before = recorded(*TWO)
    faulty = replace(before.turns[0], said=Message("assistant", "<tool_call>", fault="no JSON"), heard=user("no JSON"))
    environment = Puppet(TWO[1])
    after, difference = replay(Trajectory((faulty, before.turns[1]), Status.finished), environment)
    assert environment.heard == ["hello"]
    assert (after.total, difference) == (1.0, "")
