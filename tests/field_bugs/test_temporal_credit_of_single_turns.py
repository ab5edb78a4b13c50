"""Estimators that look ahead, forbidden because a sample was a turn.

Elsewhere GAE and REINFORCE++ were refused for training by turns: the estimator saw rows, so that every turn was an
episode of its own that ended with its last token, or it saw the last rows only and had one number per trajectory to
hand on. No credit could cross from one turn to the turns before.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from field_bugs.one_step import step_on
from support.making import make_trajectory, make_turn
from turnwise.credit.temporal import gae, reinforce_pp
from turnwise.types import Group, Status, Task, Trajectory, turns_of

DISCOUNTS = [(1.0, 1.0), (0.95, 0.9), (0.9, 0.0)]


def groups_with_history(growing):
    """Attempts of several turns that are paid on the way and in the end."""

    def attempt(sizes, rewards, outcome, seed):
        return make_trajectory(sizes, rewards=rewards, outcome=outcome, seed=seed, growing=growing)

    first = attempt([(3, 2), (2, 4), (1, 1)], [0.25, 0.0, 0.5], 1.0, 1), attempt([(3, 3), (2, 2)], [0.0, 0.75], 0.0, 2)
    second = attempt([(4, 5)], [0.5], 0.0, 3), attempt([(2, 1), (3, 2), (2, 3), (1, 2)], [0.0, -0.5, 0.25, 0.0], 1.0, 4)
    return [Group(Task("a", "test"), first), Group(Task("b", "test"), second)]


def values_of(groups):
    """A critic's value before every action token; that of a turn's first is the value of the turn's own prompt."""
    random = np.random.default_rng(7)
    return [random.normal(0.5, 0.5, len(turn.action)).astype(np.float32) for turn in turns_of(groups)]


def sequences_of(groups, values):
    """Per attempt, as one long sequence of sampled tokens: what each is paid, and the value before it."""
    remaining = iter(values)
    for group in groups:
        for trajectory in group.trajectories:
            rewards = [np.append(np.zeros(len(turn.action) - 1), turn.reward) for turn in trajectory.turns]
            rewards[-1][-1] += trajectory.outcome
            before = [next(remaining) for _ in trajectory.turns]
            yield np.concatenate(rewards), np.concatenate(before).astype(np.float64)


def backwards(rewards, values, gamma, lam):
    """Generalised advantages of one sequence, token by token from its end."""
    advantages, ahead = np.zeros(len(rewards)), 0.0
    for place in reversed(range(len(rewards))):
        following = values[place + 1] if place + 1 < len(values) else 0.0
        ahead = rewards[place] + gamma * following - values[place] + gamma * lam * ahead
        advantages[place] = ahead
    return advantages


def check_gae_is_that_of_whole_attempts(estimate, growing, gamma, lam):
    """Credit by turns is what one long sequence per attempt gives."""
    groups = groups_with_history(growing)
    values = values_of(groups)
    found = estimate(groups, {"values": values}, gamma=gamma, lam=lam, whiten=False)
    wanted = [backwards(rewards, before, gamma, lam) for rewards, before in sequences_of(groups, values)]
    assert [len(credit) for credit in found] == [len(turn.action) for turn in turns_of(groups)]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(wanted), rtol=0, atol=1e-9)


def check_reinforce_pp_is_that_of_whole_attempts(credit_of, growing, gamma):
    """Credit by turns is the whitened return from each token to the end of its attempt."""
    groups = groups_with_history(growing)
    nothing = [np.zeros(len(turn.action)) for turn in turns_of(groups)]
    sequences = sequences_of(groups, nothing)
    returns = np.concatenate([backwards(rewards, before, gamma, 1.0) for rewards, before in sequences])
    wanted = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(np.concatenate(credit_of(groups, gamma)), wanted, rtol=0, atol=1e-9)


def of_a_step(groups, gamma):
    """The credit with which a training step updates."""
    [update] = step_on(groups, "credit.name=reinforce_pp", f"credit.gamma={gamma}").updates
    return update.credit


def by_rows(estimator, groups, scores, **settings):
    """Every turn an episode of its own; the outcome comes with the last."""
    rows = [
        Group(
            group.task,
            tuple(
                Trajectory((turn,), trajectory.status, trajectory.outcome * (turn is trajectory.turns[-1]))
                for trajectory in group.trajectories
                for turn in trajectory.turns
            ),
        )
        for group in groups
    ]
    return estimator(rows, scores, **settings)


def by_last_rows(estimator, groups, scores, **settings):
    """The last turn of every attempt alone, with all that was paid, and one number of it for every token."""
    sizes = [len(trajectory.turns) for group in groups for trajectory in group.trajectories]
    ends = np.cumsum(sizes) - 1
    last = [replace(g, trajectories=tuple(replace(t, turns=t.turns[-1:]) for t in g.trajectories)) for g in groups]
    of_last = estimator(last, {name: [values[end] for end in ends] for name, values in scores.items()}, **settings)
    numbers = np.repeat([credit[0] for credit in of_last], sizes)
    return [np.full(len(turn.action), number) for turn, number in zip(turns_of(groups), numbers, strict=True)]


@pytest.mark.parametrize("growing", [True, False], ids=["growing", "rewritten"])
@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_gae_sees_whole_attempts(growing, gamma, lam):
    check_gae_is_that_of_whole_attempts(gae, growing, gamma, lam)


@pytest.mark.parametrize("growing", [True, False], ids=["growing", "rewritten"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_pp_sees_whole_attempts_in_a_step(growing, gamma):
    check_reinforce_pp_is_that_of_whole_attempts(of_a_step, growing, gamma)


@pytest.mark.parametrize("buggy", [by_rows, by_last_rows])
@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_gae_of_rows_is_caught(buggy, gamma, lam):
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_gae_is_that_of_whole_attempts(partial(buggy, gae), True, gamma, lam)


@pytest.mark.parametrize("buggy", [by_rows, by_last_rows])
def test_reinforce_pp_of_rows_is_caught(buggy):
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_reinforce_pp_is_that_of_whole_attempts(
            lambda groups, gamma: buggy(reinforce_pp, groups, {}, gamma=gamma), True, 0.9
        )


def test_turns_have_the_credit_of_the_one_sequence_they_make():
    """By the same estimator: an attempt that only grew and was paid in the end, and its tokens as a single action."""
    attempt = make_trajectory([(3, 2), (2, 4), (1, 3)], outcome=1.0, seed=5)
    tokens = np.concatenate([turn.action for turn in attempt.turns])
    whole = Trajectory((make_turn(attempt.turns[0].prompt, tokens),), Status.finished, 1.0)
    values = values_of([Group(Task("a", "test"), (attempt,))])
    how = {"gamma": 0.95, "lam": 0.9, "whiten": False}
    apart = gae([Group(Task("a", "test"), (attempt,))], {"values": values}, **how)
    one = gae([Group(Task("a", "test"), (whole,))], {"values": [np.concatenate(values)]}, **how)
    np.testing.assert_allclose(np.concatenate(apart), one[0], rtol=0, atol=1e-12)


def test_the_value_after_a_turn_is_that_of_the_next_prompt():
    groups = groups_with_history(growing=False)
    values = values_of(groups)
    before = gae(groups, {"values": values}, gamma=0.9, lam=0.0, whiten=False)
    values[1] = values[1] + np.array([1.0, 0.0, 0.0, 0.0], np.float32)
    after = gae(groups, {"values": values}, gamma=0.9, lam=0.0, whiten=False)
    moved = [np.flatnonzero(np.abs(b - a) > 1e-6).tolist() for a, b in zip(before, after, strict=True)]
    assert moved[:3] == [[1], [0], []]
    assert after[0][1] - before[0][1] == pytest.approx(0.9, abs=1e-6)
