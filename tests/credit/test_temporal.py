import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit.stepping import (
    assert_close,
    fractions,
    many,
    on_tokens,
    random_scores,
    random_step,
    seeds,
    slow_rewards,
    slow_standardise,
    slow_turn_returns,
    slow_whiten,
)
from support.making import make_group, make_trajectory, make_turn
from turnwise.credit.temporal import critic_targets, gae, gigpo, reinforce_pp, reward_to_go, turn_baseline
from turnwise.credit.totals import grpo
from turnwise.messages import Message
from turnwise.types import Group, Status, Task, Trajectory, turns_of

whitened = pytest.mark.parametrize("estimate", [reinforce_pp, gae])


def group_of(*trajectories):
    return Group(Task("task", "test"), trajectories)


def mean_total(group):
    return statistics.fmean(trajectory.total for trajectory in group.trajectories)


# Slow and obvious: plain loops over attempts, turns and tokens.


def slow_reinforce_pp(groups, scores, gamma, baseline, kl):
    turn_scores = zip(scores["old"], scores["reference"], strict=True)
    step = []
    for group in groups:
        step.append([])
        for trajectory in group.trajectories:
            rewards = slow_rewards(trajectory)
            for turn in rewards:
                old, reference = next(turn_scores)
                for t in range(len(turn)):
                    turn[t] -= kl * (float(old[t]) - float(reference[t]))
            flat = [reward for turn in rewards for reward in turn]
            returns = [sum(gamma ** (j - i) * flat[j] for j in range(i, len(flat))) for i in range(len(flat))]
            if baseline:
                returns = [value - mean_total(group) for value in returns]
            values = iter(returns)
            step[-1].append([[next(values) for _ in turn] for turn in rewards])
    return slow_whiten(step)


def slow_reward_to_go(groups, gamma):
    def of_group(group):
        returns = [slow_turn_returns(trajectory, gamma) for trajectory in group.trajectories]
        return on_tokens(group, lambda i, k: returns[i][k] - mean_total(group))

    return [of_group(group) for group in groups]


def slow_turn_baseline(groups, gamma):
    def of_group(group):
        returns = [slow_turn_returns(trajectory, gamma) for trajectory in group.trajectories]

        def of_turn(i, k):
            number = list(returns[i]).index(k)
            others = [list(r.values())[number] for j, r in enumerate(returns) if j != i and len(r) > number]
            return returns[i][k] - (sum(others) / len(others) if others else 0.0)

        return on_tokens(group, of_turn)

    return [of_group(group) for group in groups]


def slow_gigpo(groups, gamma, weight):
    def of_group(group):
        whole = slow_standardise([trajectory.total for trajectory in group.trajectories])
        returns = [slow_turn_returns(trajectory, gamma) for trajectory in group.trajectories]

        def shown_to(i, k):
            return group.trajectories[i].turns[k - 1].heard if k else "the task"

        def of_turn(i, k):
            alike = [(j, m) for j, r in enumerate(returns) for m in r if shown_to(j, m) == shown_to(i, k)]
            own = slow_standardise([returns[j][m] for j, m in alike])[alike.index((i, k))]
            return whole[i] + weight * own

        return on_tokens(group, of_turn)

    return [of_group(group) for group in groups]


def slow_gae(groups, scores, gamma, lam, unit):
    """(advantages, values they are measured from), both [group][attempt][turn][token]."""
    turn_values = iter(scores["values"])
    advantages, bases = [], []
    for group in groups:
        advantages.append([])
        bases.append([])
        for trajectory in group.trajectories:
            rewards = slow_rewards(trajectory)
            values = [[float(value) for value in next(turn_values)] for _ in rewards]
            if unit == "turn":
                moments = [(sum(r), v[0]) for r, v in zip(rewards, values, strict=True) if r]
            else:
                moments = [pair for r, v in zip(rewards, values, strict=True) for pair in zip(r, v, strict=True)]
            deltas = []
            for t, (reward, value) in enumerate(moments):
                after = moments[t + 1][1] if t + 1 < len(moments) else 0.0
                deltas.append(reward + gamma * after - value)
            sums = [
                (sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(deltas))), moments[t][1])
                for t in range(len(deltas))
            ]
            pairs = iter(sums)
            laid = []
            for turn in rewards:
                if unit == "turn":
                    laid.append([next(pairs)] * len(turn) if turn else [])
                else:
                    laid.append([next(pairs) for _ in turn])
            advantages[-1].append([[a for a, _ in turn] for turn in laid])
            bases[-1].append([[v for _, v in turn] for turn in laid])
    return advantages, bases


@many
@given(seed=seeds, gamma=fractions, baseline=st.booleans(), kl=st.sampled_from([0.0, 0.1, 2.0]))
def test_reinforce_pp_equals_its_definition(seed, gamma, baseline, kl):
    groups = random_step(seed)
    scores = random_scores(groups, seed)
    expected = slow_reinforce_pp(groups, scores, gamma, baseline, kl)
    assert_close(groups, reinforce_pp(groups, scores, gamma=gamma, baseline=baseline, kl=kl), expected)


@many
@given(seed=seeds, gamma=fractions)
def test_reward_to_go_equals_its_definition(seed, gamma):
    groups = random_step(seed)
    assert_close(groups, reward_to_go(groups, {}, gamma=gamma), slow_reward_to_go(groups, gamma))


@many
@given(seed=seeds, gamma=fractions)
def test_turn_baseline_equals_its_definition(seed, gamma):
    groups = random_step(seed)
    assert_close(groups, turn_baseline(groups, {}, gamma=gamma), slow_turn_baseline(groups, gamma))


@many
@given(seed=seeds, gamma=fractions, weight=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_gigpo_equals_its_definition(seed, gamma, weight):
    groups = random_step(seed)
    assert_close(groups, gigpo(groups, {}, gamma=gamma, weight=weight), slow_gigpo(groups, gamma, weight))


@many
@given(seed=seeds, gamma=fractions, lam=fractions, unit=st.sampled_from(["token", "turn"]))
def test_gae_equals_its_definition(seed, gamma, lam, unit):
    groups = random_step(seed)
    scores = random_scores(groups, seed)
    advantages, bases = slow_gae(groups, scores, gamma, lam, unit)
    plain = {"gamma": gamma, "lam": lam, "unit": unit}
    assert_close(groups, gae(groups, scores, whiten=False, **plain), advantages)
    assert_close(groups, gae(groups, scores, whiten=True, **plain), slow_whiten(advantages))
    targets = [
        [
            [[a + v for a, v in zip(*turns, strict=True)] for turns in zip(*attempts, strict=True)]
            for attempts in zip(*of_group, strict=True)
        ]
        for of_group in zip(advantages, bases, strict=True)
    ]
    assert_close(groups, critic_targets(groups, scores, **plain), targets)


@pytest.mark.parametrize(
    ("estimate", "settings"),
    [
        (reinforce_pp, {"gamma": 1.0, "baseline": False, "kl": 0.0}),
        (reward_to_go, {"gamma": 1.0}),
        (turn_baseline, {"gamma": 1.0}),
        (gigpo, {"gamma": 0.95, "weight": 1.0}),
        (gae, {"gamma": 1.0, "lam": 1.0, "unit": "token", "whiten": True, "kl": 0.0}),
        (critic_targets, {"gamma": 1.0, "lam": 1.0, "unit": "token", "kl": 0.0}),
    ],
)
def test_settings_left_out(estimate, settings):
    """What a recipe that names none of them trains with."""
    groups = random_step(6, min_groups=2)
    assert max(len(trajectory.turns) for group in groups for trajectory in group.trajectories) > 2
    scores = random_scores(groups)
    left_out, given = estimate(groups, scores), estimate(groups, scores, **settings)
    assert np.concatenate(left_out).tolist() == np.concatenate(given).tolist()


@many
@given(seed=seeds, size=st.integers(1, 12), gamma=fractions, lam=fractions)
def test_gae_of_one_turn_is_the_textbook(seed, size, gamma, lam):
    """The backward recursion of Schulman et al. over one sequence that is paid at its end."""
    random = np.random.default_rng(seed)
    values, outcome = random.normal(size=size).astype(np.float32), float(random.normal())
    last, ahead, expected = 0.0, 0.0, []
    for t in reversed(range(size)):
        delta = (outcome if t == size - 1 else 0.0) + gamma * ahead - float(values[t])
        last = delta + gamma * lam * last
        ahead = float(values[t])
        expected.append(last)
    groups = [group_of(make_trajectory([(2, size)], outcome=outcome))]
    (found,) = gae(groups, {"values": [values]}, gamma=gamma, lam=lam, whiten=False)
    np.testing.assert_allclose(found, expected[::-1], rtol=1e-12, atol=1e-12)


def stripped():
    """Two turns; the second prompt has lost the thinking of the first action, tokens 7 and 8."""
    first = make_turn([1, 2], [7, 8, 3], reward=0.5)
    second = make_turn([1, 2, 3, 4], [9, 5], reward=0.0)
    return [group_of(Trajectory((first, second), Status.finished, 1.0))]


STRIPPED = {"values": [np.float32([0.5, 0.25, 1.0]), np.float32([0.75, 2.0])]}


def test_gae_across_turns_with_stripped_thinking_by_hand():
    """After token 3 comes the value of the second prompt, 0.75, not a value of the first turn's own continuation.

    gamma = lam = 1/2. Differences: 0.125 - 0.5, 0.5 - 0.25, 0.5 + 0.375 - 1, 1 - 0.75, 1 - 2.
    """
    differences = [-0.375, 0.25, -0.125, 0.25, -1.0]
    expected = [-0.3203125, 0.21875, -0.125, 0.0, -1.0]
    assert expected == [sum(0.25**ahead * d for ahead, d in enumerate(differences[t:])) for t in range(5)]
    found = gae(stripped(), STRIPPED, gamma=0.5, lam=0.5, whiten=False)
    assert [values.tolist() for values in found] == [expected[:3], expected[3:]]
    targets = critic_targets(stripped(), STRIPPED, gamma=0.5, lam=0.5)
    assert [values.tolist() for values in targets] == [
        [expected[0] + 0.5, expected[1] + 0.25, expected[2] + 1.0],
        [expected[3] + 0.75, expected[4] + 2.0],
    ]


def test_gae_by_turn_by_hand():
    """Differences: 0.5 + 0.375 - 0.5 and 1 - 0.75; one advantage per turn, one target per turn."""
    found = gae(stripped(), STRIPPED, gamma=0.5, lam=0.5, unit="turn", whiten=False)
    assert [values.tolist() for values in found] == [[0.375 + 0.25 * 0.25] * 3, [0.25] * 2]
    targets = critic_targets(stripped(), STRIPPED, gamma=0.5, lam=0.5, unit="turn")
    assert [values.tolist() for values in targets] == [[0.4375 + 0.5] * 3, [1.0] * 2]


def test_the_value_after_a_cut_is_zero():
    for status in Status.finished, Status.too_many_turns, Status.too_long:
        groups = [group_of(make_trajectory([(1, 1)], outcome=1.0, status=status))]
        assert gae(groups, {"values": [np.float32([0.25])]}, whiten=False)[0].tolist() == [0.75]


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_critic_targets_with_lam_one_are_returns_whatever_the_critic_says(unit):
    groups = [group_of(make_trajectory([(1, 2), (1, 0), (1, 3)], rewards=[0.5, 0.25, 1.0], outcome=2.0))]
    targets = critic_targets(groups, random_scores(groups), unit=unit)
    assert np.concatenate(targets) == pytest.approx([3.75, 3.75, 3.0, 3.0, 3.0], abs=1e-12)


@whitened
@many
@given(seed=seeds)
def test_whitened_credit_has_no_mean_and_unit_deviation_over_the_tokens_of_the_step(estimate, seed):
    groups = random_step(seed)
    everything = np.concatenate([np.zeros(0), *estimate(groups, random_scores(groups, seed))])
    if len(everything) < 2 or not everything.any():
        return
    assert everything.mean() == pytest.approx(0.0, abs=1e-8)
    assert everything.std(ddof=1) == pytest.approx(1.0, abs=1e-4)


@whitened
def test_a_token_alone_is_whitened_to_nothing(estimate):
    groups = [group_of(make_trajectory([(1, 1)], outcome=1.0))]
    assert estimate(groups, {"values": [np.float32([0.5])]})[0].tolist() == [0.0]


def test_the_baseline_of_reinforce_pp_takes_out_what_a_group_has_in_common():
    """One task pays 10 whatever happens, the other 0 or 1: without a baseline the first drowns the second."""
    groups = [make_group([10.0, 10.0]), make_group([0.0, 1.0])]
    without = [values[0] for values in reinforce_pp(groups, {})]
    assert without[0] > 0.8
    assert without[3] < 0
    credit = [values[0] for values in reinforce_pp(groups, {}, baseline=True)]
    assert credit[:2] == [0.0, 0.0]
    assert credit[3] == -credit[2] > 0.8


def test_kl_charges_tokens_the_reference_finds_unlikely():
    groups = [group_of(make_trajectory([(1, 2)]), make_trajectory([(1, 2)]))]
    scores = {
        "old": [np.float32([-1, -1]), np.float32([-1, -1])],
        "reference": [np.float32([-1, -3]), np.float32([-1, -1])],
    }
    first, second = reinforce_pp(groups, scores, kl=0.5)
    assert first.tolist() == pytest.approx([-(3**0.5) / 2] * 2, rel=1e-5)
    assert second.tolist() == pytest.approx([3**0.5 / 2] * 2, rel=1e-5)
    alone = reinforce_pp(groups, scores)
    assert not np.concatenate(alone).any()
    as_sampled = reinforce_pp(groups, {"reference": [turn.logprobs for turn in turns_of(groups)]}, kl=0.5)
    assert not np.concatenate(as_sampled).any()


def test_reward_to_go_pays_no_turn_for_what_came_before_it():
    early = make_trajectory([(1, 1), (1, 1)], rewards=[1.0, 0.0])
    late = make_trajectory([(1, 1), (1, 1)], rewards=[0.0, 1.0])
    credit = reward_to_go([group_of(early, late)], {})
    assert [values.item() for values in credit] == [0.0, -1.0, 0.0, 0.0]
    discounted = reward_to_go([group_of(early, late)], {}, gamma=0.5)
    assert [values.item() for values in discounted] == [0.0, -1.0, -0.5, 0.0]


def test_turn_baseline_compares_with_others_that_got_as_far():
    short = make_trajectory([(1, 1)], outcome=0.0)
    middle = make_trajectory([(1, 1), (1, 1)], outcome=1.0)
    long = make_trajectory([(1, 1), (1, 1), (1, 1)], outcome=4.0)
    credit = [values.item() for values in turn_baseline([group_of(short, middle, long)], {})]
    assert credit == pytest.approx([-2.5, -1.0, -3.0, 3.5, 3.0, 4.0])


def test_an_empty_turn_is_no_turn_to_reach():
    """Neither for the discount nor for whom it is compared with."""
    plain = make_trajectory([(1, 1), (1, 1)], rewards=[0.5, 0.25], outcome=1.0)
    empty = make_trajectory([(1, 1), (1, 0), (1, 1), (1, 0)], rewards=[0.25, 0.25, 0.125, 0.125], outcome=1.0)
    for estimate in (reward_to_go, turn_baseline):
        alone = estimate([group_of(plain, plain)], {}, gamma=0.5)
        mixed = estimate([group_of(plain, empty)], {}, gamma=0.5)
        assert [len(values) for values in mixed] == [1, 1, 1, 0, 1, 0]
        assert np.concatenate(mixed).tolist() == np.concatenate(alone).tolist()


def heard(*observations, outcome):
    """An attempt that heard these, one after each turn but the last."""
    turns = [make_turn([1], [2], heard=(Message("user", text),)) for text in observations]
    return Trajectory((*turns, make_turn([1], [2])), Status.finished, outcome)


def test_gigpo_compares_turns_that_saw_the_same():
    groups = [group_of(heard("door", outcome=1.0), heard("wall", "door", outcome=0.0), heard("sea", outcome=0.0))]
    own = [(a - b).item() for a, b in zip(gigpo(groups, {}, gamma=1.0), grpo(groups, {}), strict=True)]
    first = slow_standardise([1.0, 0.0, 0.0])
    door = slow_standardise([1.0, 0.0])
    assert own == pytest.approx([first[0], door[0], first[1], 0.0, door[1], first[2], 0.0], abs=1e-12)


def test_gigpo_does_not_compare_across_groups():
    apart = [group_of(heard("door", outcome=1.0)), group_of(heard("door", outcome=0.0))]
    assert not np.concatenate(gigpo(apart, {})).any()


def test_gigpo_distinguishes_a_first_turn_from_one_after_an_empty_reply():
    groups = [group_of(make_trajectory([(1, 1), (1, 1)], rewards=[0.0, 1.0]))]
    assert [values.item() for values in gigpo(groups, {}, gamma=0.5)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("estimate", "settings", "problem"),
    [
        (reinforce_pp, {"gamma": 1.5}, "gamma must be between 0 and 1"),
        (reinforce_pp, {"kl": -0.1}, "kl must be 0 or more"),
        (reinforce_pp, {"kl": math.inf}, "kl must be 0 or more"),
        (reward_to_go, {"gamma": -0.5}, "gamma must be between 0 and 1"),
        (turn_baseline, {"gamma": math.nan}, "gamma must be between 0 and 1"),
        (gigpo, {"gamma": 2.0}, "gamma must be between 0 and 1"),
        (gigpo, {"weight": -1.0}, "weight must be 0 or more"),
        (gigpo, {"weight": math.inf}, "weight must be 0 or more"),
        (gae, {"gamma": 1.1}, "gamma must be between 0 and 1"),
        (gae, {"lam": 1.1}, "lam must be between 0 and 1"),
        (gae, {"kl": -0.1}, "kl must be 0 or more"),
        (gae, {"unit": "step"}, 'unit must be "token" or "turn"'),
        (critic_targets, {"lam": -1.0}, "lam must be between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused_before_there_is_a_group(estimate, settings, problem):
    with pytest.raises(ValueError, match=problem) as error:
        estimate([], {}, **settings)
    assert "\n" not in str(error.value)
