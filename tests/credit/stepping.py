"""Random steps for tests of credit: ragged groups with all that happens, and scores of them."""

from functools import cache

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from support.making import make_turn
from turnwise.messages import Message
from turnwise.types import Group, Status, Task, Trajectory, turns_of

many = settings(max_examples=200, deadline=None)
HEARD = [(), (Message("user", "a"),), (Message("user", "b"),), (Message("user", "a"), Message("user", "b"))]
COUNTING = [Status.finished, Status.too_many_turns, Status.too_long]
TURNS = [1, 2, 3, 6]
SIZES = np.array([0, 0, 0, 1, 1, 1, 2, 2, 5, 5])
FAILED = [Status.failed, Status.timed_out]


def random_trajectory(random, pay, statuses):
    turns = [
        make_turn(
            random.integers(0, 9, random.integers(1, 4)),
            random.integers(0, 9, size),
            reward=pay(),
            heard=HEARD[random.integers(len(HEARD))],
            logprobs=-random.exponential(1.0, size),
        )
        for size in SIZES[random.integers(0, len(SIZES), TURNS[random.integers(len(TURNS))])]
    ]
    return Trajectory(tuple(turns), statuses[random.integers(len(statuses))], pay())


@cache
def random_step(seed, *, lowest=-1.0, min_groups=0):
    """Groups of 0 to 4 attempts, among them failed ones, empty actions, ties; paid by turn and in the end.

    Pay is in halves in every other step, so that totals tie, and any number in the others.
    """
    random = np.random.default_rng(seed)
    halves = [amount for amount in (-1.0, -0.5, 0.0, 0.0, 0.5, 1.0) if amount >= lowest]
    pay = (lambda: halves[random.integers(len(halves))]) if seed % 2 else (lambda: float(random.uniform(lowest, 1.0)))
    return [
        Group(
            Task(f"task-{place}", "test"),
            tuple(random_trajectory(random, pay, COUNTING) for _ in range(random.integers(0, 5))),
            tuple(random_trajectory(random, pay, FAILED) for _ in range(random.integers(0, 2))),
        )
        for place in range(random.integers(min_groups, 4))
    ]


def random_scores(groups, seed=0):
    random = np.random.default_rng(seed)
    names = ("old", "reference", "teacher", "values")
    return {
        name: [-random.exponential(1.0, len(turn.action)).astype(np.float32) for turn in turns_of(groups)]
        for name in names
    }


seeds = st.integers(0, 999)
"""Of random steps. Drawn piece by piece, or made anew for every test, they would take far longer than credit takes."""
fractions = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


def nested(groups, per_turn):
    """[group][attempt][turn][token] of one array per turn, having checked that there is one number per action token."""
    remaining = iter(per_turn)
    found = [[[next(remaining) for _ in trajectory.turns] for trajectory in group.trajectories] for group in groups]
    assert next(remaining, None) is None
    assert [len(values) for values in per_turn] == [len(turn.action) for turn in turns_of(groups)]
    assert all(values.dtype == np.float64 for values in per_turn)
    return found


def assert_close(groups, per_turn, expected):
    """One array per turn against [group][attempt][turn][token], to rounding."""
    found = nested(groups, per_turn)
    sizes = [[[len(turn) for turn in attempt] for attempt in group] for group in expected]
    assert sizes == [[[len(turn) for turn in attempt] for attempt in group] for group in found]
    numbers = [value for group in expected for attempt in group for turn in attempt for value in turn]
    everything = np.concatenate([np.zeros(0), *per_turn])
    np.testing.assert_allclose(everything, np.array(numbers, np.float64), rtol=1e-9, atol=1e-9)


def permuted(groups, order, per_turn):
    """Groups in another order, and one array per turn in that order."""
    by_group = nested(groups, per_turn)
    return [groups[place] for place in order], [v for place in order for attempt in by_group[place] for v in attempt]


# Slow and obvious: what is paid when.


def slow_rewards(trajectory):
    """[turn][token] pay; that of a turn without tokens goes to the token before it, else to the token after it."""
    turns = trajectory.turns
    rewards = [[0.0] * len(turn.action) for turn in turns]
    for place, amount in [
        *((place, turn.reward) for place, turn in enumerate(turns)),
        (len(turns) - 1, trajectory.outcome),
    ]:
        earlier = [turn for turn in range(place + 1) if rewards[turn]]
        later = [turn for turn in range(place + 1, len(turns)) if rewards[turn]]
        if earlier:
            rewards[earlier[-1]][-1] += amount
        elif later:
            rewards[later[0]][0] += amount
    return rewards


def slow_turn_returns(trajectory, gamma):
    """By number of the turn, for turns that have tokens: what is paid from it on, discounted once per such turn."""
    rewards = {place: sum(tokens) for place, tokens in enumerate(slow_rewards(trajectory)) if tokens}
    places = list(rewards)
    return {
        place: sum(gamma**ahead * rewards[later] for ahead, later in enumerate(places[number:]))
        for number, place in enumerate(places)
    }


def slow_standardise(values):
    """The numbers minus their mean over their unbiased deviation; alone, 0."""
    n = len(values)
    if n < 2:
        return [0.0] * n
    mean = sum(values) / n
    deviation = (sum((value - mean) ** 2 for value in values) / (n - 1)) ** 0.5
    return [(value - mean) / (deviation + 1e-6) for value in values]


def slow_whiten(step):
    """[group][attempt][turn][token] standardised over all tokens."""
    flat = iter(slow_standardise([v for group in step for attempt in group for turn in attempt for v in turn]))
    return [[[[next(flat) for _ in turn] for turn in attempt] for attempt in group] for group in step]


def on_tokens(group, of_turn):
    """[attempt][turn][token] of a function of (attempt, turn)."""
    return [
        [[of_turn(i, k)] * len(turn.action) if len(turn.action) else [] for k, turn in enumerate(trajectory.turns)]
        for i, trajectory in enumerate(group.trajectories)
    ]
