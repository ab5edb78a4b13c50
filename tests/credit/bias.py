"""A diagnostic: how far an estimator's expected gradient is from the true one where the policy may stop early.

The smallest problem that tells baselines apart has two turns. In the first the policy stops with a known pay, or goes
on; in the second it fails or succeeds. Every group of attempts is enumerated with its probability, so the expectation
is exact. The ratio of expected to true gradient is 1 for turn_baseline, whatever the numbers; for those below it is
0.667 and 0.480 where the mean over a turn includes the attempt itself, and 2.3 and 0.76 with a z-score per turn.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from turnwise.credit.estimators import Estimate
from turnwise.messages import Message
from turnwise.types import Group, Status, StopReason, Task, Trajectory, Turn, turns_of

STOP, FAIL, SUCCEED = 0, 1, 2


def gradient_ratios(
    estimate: Estimate,
    *,
    attempts: int = 3,
    go_on: float = 0.6,
    succeed: float = 0.7,
    stopped: float = 0.5,
    failed: float = 0.0,
    succeeded: float = 1.0,
) -> tuple[float, float]:
    """Expected over true gradient of the expected total, in the chances to go on and to succeed.

    `estimate` takes (groups, scores) and must need no scores. An attempt is paid `stopped`, `failed` or `succeeded`.
    """
    chances = {STOP: 1.0 - go_on, FAIL: go_on * (1.0 - succeed), SUCCEED: go_on * succeed}
    pays = {STOP: stopped, FAIL: failed, SUCCEED: succeeded}
    first: list[float] = []
    second: list[float] = []
    for endings in product((STOP, FAIL, SUCCEED), repeat=attempts):
        chance = math.prod(chances[ending] for ending in endings) / attempts
        group = Group(Task("two-turns", "bias"), tuple(attempt(ending, pays[ending]) for ending in endings))
        for turn, credit in zip(turns_of([group]), estimate([group], {}), strict=True):
            is_first, chosen = len(turn.prompt) == 1, int(turn.action[0])
            probability = go_on if is_first else succeed
            score = 1.0 / probability if chosen else -1.0 / (1.0 - probability)
            (first if is_first else second).append(chance * float(credit[0]) * score)
    true = succeed * succeeded + (1.0 - succeed) * failed - stopped, go_on * (succeeded - failed)
    return math.fsum(first) / true[0], math.fsum(second) / true[1]


def attempt(ending: int, paid: float) -> Trajectory:
    """An attempt of one token per turn: 1 to go on, then 1 to succeed."""
    turns = [decision([0], int(ending != STOP))]
    if ending != STOP:
        turns.append(decision([0, 1, 0], int(ending == SUCCEED)))
    return Trajectory(tuple(turns), Status.finished, paid)


def decision(prompt: list[int], chosen: int) -> Turn:
    action, nothing = np.array([chosen], np.int32), np.zeros(1, np.int32)
    said = Message("assistant", str(chosen))
    return Turn(np.array(prompt, np.int32), action, np.zeros(1, np.float32), nothing, StopReason.length, 0.0, said)
