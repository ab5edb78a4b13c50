"""Credit of the last turn, copied to the others.

Elsewhere turns were rows of a padded matrix. The advantage of a trajectory was computed on its last row, as a number on
the positions of that row's action, and those positions were copied to the other rows. A row held the observation after
its action, so the actions of the others stood elsewhere: (N - 1) / N of the turns trained on zeros.
"""

import numpy as np
import pytest

from field_bugs.one_step import step_on
from support.making import make_turn
from turnwise.credit.totals import grpo
from turnwise.messages import Message
from turnwise.types import Group, Status, Task, Trajectory, turns_of

NUM_TURNS = 4
TOTALS = (0.0, 1.0, 0.25)


def rewritten_history():
    """A group whose prompts do not extend each other: every turn begins anew, with actions of different sizes."""
    random = np.random.default_rng(0)

    def turn(number):
        is_last = number == NUM_TURNS - 1
        heard = () if is_last else (Message("user", "found: " + "x" * (20 + 7 * number)),)
        prompt, action = random.integers(0, 64, 5 + 3 * number), random.integers(0, 64, 2 + number % 3)
        return make_turn(prompt, action, heard=heard)

    attempts = [Trajectory(tuple(map(turn, range(NUM_TURNS))), Status.finished, total) for total in TOTALS]
    return Group(Task("rewritten", "test"), tuple(attempts))


def check_every_turn_has_its_credit(estimate):
    """Every action token of every turn reaches the learner with the advantage of its attempt."""
    group = rewritten_history()
    [update] = step_on([group], estimate=estimate).updates
    advantages = (np.array(TOTALS) - np.mean(TOTALS)) / (np.std(TOTALS, ddof=1) + 1e-6)
    wanted = [
        np.full(len(turn.action), advantage)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        for turn in trajectory.turns
    ]
    right = [np.allclose(given, want, rtol=0, atol=1e-9) for given, want in zip(update.credit, wanted, strict=True)]
    assert all(right), f"{right.count(False)} of {len(right)} turns have another credit"


def copied_from_the_last_turn(groups, scores):
    """Rows of equal width, each response (action, then observation) at their right end; a trajectory's credit is made
    on its last row and copied to its others."""
    turns = list(turns_of(groups))
    observed = [sum(len(message.content) for message in turn.heard) for turn in turns]
    width = max(len(turn.action) + after for turn, after in zip(turns, observed, strict=True))
    is_action = np.zeros((len(turns), width), bool)
    for row, (turn, after) in enumerate(zip(turns, observed, strict=True)):
        is_action[row, width - after - len(turn.action) : width - after] = True
    is_last = np.cumsum([len(trajectory.turns) for group in groups for trajectory in group.trajectories]) - 1
    advantages = np.array([credit[0] for credit in grpo(groups, scores)])
    of_last_rows = advantages[is_last, None] * is_action[is_last]
    trajectory_of = np.searchsorted(is_last, np.arange(len(turns)))
    rows = of_last_rows[trajectory_of]
    return [rows[row, is_action[row]] for row in range(len(turns))]


def test_every_turn_has_its_own_credit():
    check_every_turn_has_its_credit(grpo)


def test_copied_positions_are_caught():
    with pytest.raises(AssertionError, match="9 of 12 turns have another credit"):
        check_every_turn_has_its_credit(copied_from_the_last_turn)


def test_the_copy_left_zeros():
    credit = copied_from_the_last_turn([rewritten_history()], {})
    assert [bool(of_turn.any()) for of_turn in credit] == [False, False, False, True] * len(TOTALS)
