"""A failed rollout in the baseline.

Elsewhere an attempt whose environment or engine broke down became a sample with reward 0. It moved the mean and the
deviation of its group, so that a sandbox out of memory taught the policy that its neighbours had done well; or nobody
caught the error and it ended the process.
"""

from dataclasses import replace

import numpy as np
import pytest

from support.acting import Puppet, hang, limits, renderer, run, says, user
from turnwise.assemble.objective import failure_of
from turnwise.credit.estimators import ESTIMATORS
from turnwise.engines.base import EngineFailure, Sampling
from turnwise.envs.base import Reply
from turnwise.recipe.parse import parse_recipe
from turnwise.rollout import attempt
from turnwise.rollout.group import AttemptMaker
from turnwise.runs.describe import describe
from turnwise.types import Group, Status, Task

BREAKDOWNS = ("environment", "exit", "engine", "hang")
PAID = (1.0, 0.5, 0.75)
STATISTICS = ("reward/mean", "reward/std", "reward/min", "success", "trajectory/count", "turn/count", "stop/end_token")
settled = failure_of(parse_recipe({"env": {"name": "hops"}}, "test"))
"""What a run does with failed attempts unless its recipe says otherwise."""


def practised(breakdown=None):
    """The group of attempts that are paid `PAID`, two turns each, with one among them that breaks at its second."""
    attempts = [Puppet(Reply(user("on")), Reply(finished=True, outcome=paid)) for paid in PAID]
    if breakdown:
        wrong = {"environment": RuntimeError("out of memory"), "exit": SystemExit(1), "hang": hang}
        attempts.insert(1, Puppet(Reply(user("on")), wrong.get(breakdown)))
    asked = []

    def speak(prompt, session, seed):
        asked.append(session)
        if breakdown == "engine" and session.endswith("/1/0") and asked.count(session) == 2:
            raise EngineFailure("the engine is gone")
        return "hello"

    makers = iter(attempts)
    practice = AttemptMaker(
        environments={"test": lambda: next(makers)},
        engine=says(speak),
        renderer=renderer(),
        sampling=Sampling(50),
        limits=limits(call_seconds=0.1),
        seed=0,
        split="train",
        attempts=len(attempts),
    )
    return run(practice.group(Task("fragile", "test"), 0))


def check_failures_stay_out_of_the_statistics(settle, breakdown):
    """The attempts beside a failed one have the credit and the metrics they would have without it; it is counted."""
    try:
        group = settle(practised(breakdown))
    except BaseException as error:
        raise AssertionError(f"the process would have ended: {error!r}") from error
    sound = practised()
    assert [t.total for t in sound.trajectories] == list(PAID)
    before, after = (describe([of], (), version=0, success_at=1.0) for of in (sound, group))
    changed = [name for name in STATISTICS if before[name] != after[name]]
    for name in [name for name in ESTIMATORS if not ESTIMATORS[name].needs]:
        alone, beside = (np.concatenate(ESTIMATORS[name].function([of], {})) for of in (sound, group))
        if not np.array_equal(alone, beside):
            changed.append(f"credit by {name}")
    assert not changed, f"a failed attempt has changed {', '.join(changed)}"
    [failed] = group.failed
    assert failed.status is (Status.timed_out if breakdown == "hang" else Status.failed)
    assert (after["trajectory/failed"], after[f"status/{failed.status}"], after["failure/rate"]) == (1.0, 1.0, 0.25)


def as_zero_reward(group):
    """The group as the other system made it: a failed attempt is a sample like any other, with nothing earned."""
    zero = tuple(
        replace(t, turns=tuple(replace(turn, reward=0.0) for turn in t.turns), status=Status.finished, outcome=0.0)
        for t in group.failed
    )
    return Group(group.task, (*group.trajectories, *zero))


@pytest.mark.parametrize("breakdown", BREAKDOWNS)
def test_failed_attempts_leave_the_statistics(breakdown):
    check_failures_stay_out_of_the_statistics(settled, breakdown)


@pytest.mark.parametrize("breakdown", BREAKDOWNS)
def test_a_zero_reward_sample_is_caught(breakdown):
    with pytest.raises(AssertionError, match=r"has changed reward/mean, .*credit by grpo, credit by rloo"):
        check_failures_stay_out_of_the_statistics(as_zero_reward, breakdown)


@pytest.mark.parametrize("breakdown", ["environment", "exit", "engine"])
def test_an_error_that_ends_the_process_is_caught(breakdown, monkeypatch):
    """Nobody tells an error of the environment from somebody at the keyboard, and it is raised on."""
    monkeypatch.setattr(attempt, "is_from_outside", lambda error: True)
    with pytest.raises(AssertionError, match="the process would have ended"):
        check_failures_stay_out_of_the_statistics(settled, breakdown)
