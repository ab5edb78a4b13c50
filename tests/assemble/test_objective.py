"""What a recipe's names come to, and what is refused with its reason."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from properties.tabular import random_groups, step
from support.making import make_group, make_trajectory
from turnwise.assemble import objective as choices
from turnwise.assemble.checks import check
from turnwise.assemble.learner import frozen_models
from turnwise.credit.estimators import ESTIMATORS, Estimator
from turnwise.credit.filters import FILTERS, Filter
from turnwise.credit.weighting import WEIGHTINGS, Weighting
from turnwise.learn.losses import LOSSES, Loss
from turnwise.learn.teacher import forward, reverse
from turnwise.recipe.parse import parse_recipe
from turnwise.types import Group, Status, turns_of


def recipe(**changes):
    return parse_recipe({"env": {"name": "hops"}, **changes}, "test.toml")


TAUGHT = {"distill": {"coefficient": 1.0}, "teacher": "."}
ALONE = {"credit": {"name": "none"}, **TAUGHT}
REFUSED = [
    (
        {"correction": {"importance_sampling": "token"}, "loss": {"name": "ppo_clip", "anchor": "engine"}},
        "count the ratio twice",
    ),
    ({"loss": {"name": "gspo"}}, 'loss gspo needs loss.scope = "turn" or "trajectory"'),
    ({"loss": {"name": "gspo", "scope": "row"}}, 'needs loss.scope = "turn" or "trajectory"'),
    ({"loss": {"name": "ppo_clip", "scope": "turn"}}, "loss.scope: loss ppo_clip takes no such setting"),
    ({"loss": {"name": "reinforce", "anchor": "engine"}}, "loss.anchor would be ignored: reinforce has no ratio"),
    ({"loss": {"name": "ppo_clip", "anchor": "learner"}, "max_lag": 1}, "max_lag would be ignored"),
    ({"loss": {"name": "ppo_clip", "anchor": "learner", "clip_low": 0.1}}, "loss.clip_low would be ignored"),
    ({"loss": {"name": "ppo_clip", "clip_low": -1.0}}, "loss.clip_low of ppo_clip must be 0 or more"),
    ({"kl": {"coefficient": 0.1, "divergence": "k1"}}, "k1 as a loss has an expected gradient of zero"),
    ({"kl": {"divergence": "k2"}}, "divergence is ignored without a coefficient"),
    ({"kl": {"coefficient": 0.1, "apply_to": "reward", "divergence": "k2"}}, "the charge is k1"),
    (
        {"kl": {"coefficient": 0.1, "apply_to": "reward"}, "credit": {"name": "maxrl"}},
        "which a KL charge does not leave",
    ),
    (
        {"kl": {"coefficient": 0.1, "apply_to": "reward"}, "filter": {"name": "dynamic_sampling"}},
        "would drop groups that carry signal",
    ),
    ({"kl": {"coefficient": 0.1, "reference": "nowhere"}}, "no model folder at nowhere; set kl.reference"),
    ({"credit": {"name": "reinforce_pp", "kl": 0.1}}, "credit.kl: credit reinforce_pp takes no such setting"),
    ({"credit": {"name": "distill"}}, "credit distill needs teacher = FOLDER"),
    ({"teacher": "."}, "credit grpo would ignore the teacher"),
    ({"distill": {"coefficient": 1.0}}, "distill.coefficient needs teacher = FOLDER"),
    ({"distill": {"coefficient": 1.0}, "teacher": "nowhere"}, "no model folder at nowhere; set teacher"),
    ({"distill": {"top_k": 4}}, "top_k is ignored without a coefficient"),
    ({"distill": {"direction": "forward"}, "teacher": "."}, "direction is ignored without a coefficient"),
    ({"distill": {"coefficient": 1.0, "top_k": 0}, "teacher": "."}, "top_k"),
    ({"distill": {"coefficient": -1.0}, "teacher": "."}, "coefficient"),
    ({"distill": {"coefficient": 1.0, "direction": "both"}, "teacher": "."}, "direction"),
    (
        {**TAUGHT, "filter": {"name": "dynamic_sampling"}},
        "would drop groups whose tokens the teacher still has something",
    ),
    ({"credit": {"name": "none"}}, "credit none gives nothing to learn by itself; set distill.coefficient"),
    ({**ALONE, "filter": {"name": "dynamic_sampling"}}, "still carry signal for none"),
    ({**ALONE, "loss": {"name": "ppo_clip", "clip_low": 0.1}}, "[loss] would be ignored"),
    ({**ALONE, "loss": {"name": "reinforce"}}, "[loss] would be ignored"),
    ({**ALONE, "correction": {"importance_sampling": "token"}}, "[correction] would be ignored"),
    ({**ALONE, "kl": {"coefficient": 0.1, "apply_to": "reward"}}, "credit none looks at no reward"),
    (
        {**ALONE, "rollout": {"failures": {"on_truncation": "zero"}}},
        'rollout.failures.on_truncation = "zero" would be ignored: credit none',
    ),
    (
        {"credit": {"name": "distill"}, "teacher": ".", "rollout": {"failures": {"on_truncation": "zero"}}},
        'rollout.failures.on_truncation = "zero" would be ignored: credit distill',
    ),
    ({"critic": {"clip": 0.1}}, "credit grpo would ignore the critic"),
    ({"correction": {"importance_ratio_cap": 3.0}}, 'importance_ratio_cap is ignored with importance_sampling = "off"'),
    ({"correction": {"importance_sampling": "token", "scope": "turn"}}, "scope is ignored without"),
    ({"correction": {"token_band": [2.0, 0.5]}}, "write two bounds, 0 <= low < high"),
    ({"rollout": {"failures": {"on_failure": {"name": "drop", "value": 1.0}}}}, "rollout.failures.on_failure.value"),
    (
        {"rollout": {"failures": {"on_failure": {"name": "pray"}}}},
        "rollout.failures.on_failure.name = 'pray' does not exist",
    ),
    ({"entropy": -0.1}, "entropy"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_would_not_mean_what_it_says_is_refused_in_one_line(changes, says):
    with pytest.raises(ValueError) as raised:
        check(recipe(**changes))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


FINE = [
    {"loss": {"name": "gspo", "scope": "trajectory"}},
    {"loss": {"name": "gspo", "scope": "turn", "anchor": "learner"}, "groups_per_update": 4},
    {"loss": {"name": "reinforce"}},
    {"correction": {"importance_sampling": "token"}},
    {"correction": {"importance_sampling": "sequence", "scope": "turn", "sequence_band": [0.5, 2.0]}, "max_lag": 2},
    {"correction": {"token_band": [0.5, 5.0]}, "loss": {"name": "reinforce"}},
    {"kl": {"coefficient": 0.1}},
    {"kl": {"coefficient": 0.1, "apply_to": "reward"}, "credit": {"name": "reinforce_pp"}},
    {"rollout": {"failures": {"on_failure": {"name": "pay", "value": -1.0}}}},
    {"entropy": 0.01, "loss": {"name": "dppo", "divergence": "kl"}},
    TAUGHT,
    {**TAUGHT, "distill": {"coefficient": 0.1, "top_k": 64, "direction": "forward"}, "credit": {"name": "distill"}},
    {**TAUGHT, "loss": {"name": "cispo"}, "correction": {"importance_sampling": "token"}, "max_lag": 1},
    ALONE,
    {
        **ALONE,
        "kl": {"coefficient": 0.1},
        "entropy": 0.01,
        "max_lag": 1,
        "rollout": {"failures": {"on_truncation": "mask"}},
    },
    {**ALONE, "groups_per_step": 1, "rollout": {"group_size": 1, "failures": {"min_attempts": 1}}},
]


@pytest.mark.parametrize("changes", FINE)
def test_what_means_something_is_taken(changes):
    check(recipe(**changes))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, set()),
        ({"groups_per_update": 4}, set()),  # anchored on the engine: its logprobs are recorded
        ({"loss": {"name": "ppo_clip", "anchor": "learner"}}, set()),  # the only update is its own old policy
        ({"loss": {"name": "ppo_clip", "anchor": "learner"}, "epochs": 2}, {"old"}),
        ({"correction": {"importance_sampling": "token"}}, {"old"}),
        ({"kl": {"coefficient": 0.1}}, {"reference"}),
        ({"credit": {"name": "distill"}, "teacher": "."}, {"teacher"}),
        (TAUGHT, {"buckets"}),
        (ALONE, {"buckets"}),
        ({**TAUGHT, "credit": {"name": "distill"}}, {"buckets", "teacher"}),
    ],
)
def test_only_needed_scores_are_computed(changes, needed):
    assert choices.needs(recipe(**changes)) == needed


def test_paying_for_failure_comes_before_filters_and_credit():
    crashed = make_trajectory([(1, 2)], status=Status.failed)
    group = make_group([1.0, 1.0])
    group = Group(group.task, group.trajectories, (crashed,))
    paying = recipe(
        rollout={"failures": {"on_failure": {"name": "pay", "value": 0.0}}},
        filter={"name": "dynamic_sampling"},
        credit={"name": "rloo"},
    )
    assert not choices.keep_of(paying)(group)
    settled = choices.failure_of(paying)(group)
    assert choices.keep_of(paying)(settled)
    credit = choices.estimate_of(paying)([settled], {})
    assert [values[0] for values in credit] == [0.5, 0.5, -1.0]


@pytest.mark.parametrize("name", ["grpo", "reward_to_go", "reinforce_pp"])
def test_a_charge_in_the_reward_lowers_the_credit_of_what_strayed(name):
    groups = [make_group([1.0, 1.0, 0.0])]
    sizes = [2, 2, 2]
    scores = {
        "old": [np.full(size, -1.0) for size in sizes],
        "reference": [np.full(sizes[0], -5.0), np.full(sizes[1], -1.0), np.full(sizes[2], -1.0)],
    }
    charging = recipe(credit={"name": name}, kl={"coefficient": 0.05, "apply_to": "reward"})
    strayed, stayed, _ = choices.estimate_of(charging)(groups, scores)
    assert strayed[0] < stayed[0]
    free, same, _ = choices.estimate_of(recipe(credit={"name": name}))(groups, scores)
    assert free[0] == same[0]


def test_gap_limits():
    assert choices.max_logprob_gap_of(recipe()) == 1e-3
    assert choices.max_logprob_gap_of(recipe(model={"dtype": "bfloat16"})) == 0.1
    assert choices.max_logprob_gap_of(recipe(guards={"max_logprob_gap": 0.5})) == 0.5


def test_the_teacher_is_in_the_objective_only_where_a_recipe_says_so():
    assert choices.objective_of(recipe()).distill == 0.0
    taught = choices.objective_of(recipe(teacher=".", distill={"coefficient": 0.3, "direction": "forward"}))
    assert (taught.distill, taught.direction) == (0.3, forward)
    assert choices.objective_of(recipe(**TAUGHT)).direction is reverse


# ---------------------------------------------------------------- a new variant is one record


@pytest.fixture
def enter_toy(monkeypatch):
    """Enters a toy estimator in the table with the facts given: its credit is `scale` on every token. Gives a list of
    the names of the scores that each call was given."""

    def enter(**facts):
        read = []

        def toy(groups, scores, *, scale: float = 1.0):
            read.append(set(scores))
            return [np.full(len(turn.action), scale) for turn in turns_of(groups)]

        monkeypatch.setitem(ESTIMATORS, "toy", Estimator(toy, **facts))
        return read

    return enter


def toy_recipe(**changes):
    return recipe(**{"credit": {"name": "toy"}, **changes})


def test_a_recipe_can_name_a_new_estimator_and_its_settings(enter_toy):
    enter_toy()
    named = toy_recipe(credit={"name": "toy", "scale": 0.5})
    check(named)
    credit = choices.estimate_of(named)([make_group([0.0, 1.0])], {})
    assert {value for values in credit for value in values} == {0.5}
    with pytest.raises(ValueError, match="credit.skale: credit toy takes no such setting; did you mean scale"):
        check(toy_recipe(credit={"name": "toy", "skale": 0.5}))
    with pytest.raises(ValueError, match="credit.scale"):
        check(toy_recipe(credit={"name": "toy", "scale": "large"}))


@pytest.mark.parametrize("needed", [set(), {"reference"}, {"old"}, {"teacher"}, {"reference", "old"}])
def test_what_a_new_estimator_needs_is_scored_before_the_update_and_nothing_else(enter_toy, needed):
    read = enter_toy(needs=frozenset(needed))
    named = toy_recipe(**({"teacher": "."} if "teacher" in needed else {}))
    check(named)
    assert choices.needs(named) == needed
    read.clear()
    step(named, random_groups(3), lambda turns: [turns] if turns else [])
    assert read == [needed]


def test_the_models_that_a_new_estimator_needs_are_loaded(enter_toy):
    class OfToy:
        def start(self):
            return "start"

    models: Any = OfToy()
    enter_toy()
    assert frozen_models(toy_recipe(), models) == {}
    enter_toy(needs=frozenset({"reference"}))
    assert frozen_models(toy_recipe(), models) == {"reference": "start"}  # type: ignore[comparison-overlap]


def test_a_new_estimator_that_needs_values_trains_a_critic(enter_toy):
    def to_the_total(groups, scores, *, kl=0.0):
        return [np.full(len(turn.action), 7.0) for turn in turns_of(groups)]

    enter_toy()
    assert choices.targets_of(toy_recipe()) is None
    with pytest.raises(ValueError, match="credit toy would ignore the critic; use credit gae, or remove"):
        check(toy_recipe(critic={"clip": 0.1}))
    enter_toy(needs=frozenset({"values"}), critic_targets=to_the_total)
    with_critic = toy_recipe(critic={"clip": 0.1}, credit={"name": "toy", "scale": 0.5})
    check(with_critic)
    assert choices.needs(with_critic) == {"values"}
    targets_of: Any = choices.targets_of(with_critic)
    assert {value for values in targets_of([make_group([1.0])], {}) for value in values} == {7.0}
    with pytest.raises(ValueError, match="use credit gae or toy, or remove"):
        check(recipe(critic={"clip": 0.1}))


KL_IN_REWARD = {"kl": {"coefficient": 0.1, "apply_to": "reward"}}
ONE_ATTEMPT = {"groups_per_step": 1, "rollout": {"group_size": 1, "failures": {"min_attempts": 1}}}
BY_FACTS = [
    ({"needs": frozenset({"teacher"})}, {}, "credit toy needs teacher = FOLDER"),
    ({}, {"teacher": "."}, "credit toy would ignore the teacher"),
    ({}, {"filter": {"name": "dynamic_sampling"}}, "still carry signal for toy; use it with grpo or maxrl or rloo"),
    (
        {"compares_attempts": True},
        ONE_ATTEMPT,
        "credit toy compares attempts; rollout.failures.min_attempts must be at least 2",
    ),
    ({}, ONE_ATTEMPT, "a step of one attempt has nothing to compare it with"),
    ({"reads_rewards": False}, KL_IN_REWARD, "credit toy looks at no reward, so that a KL charge"),
    (
        {"reads_rewards": False},
        {"rollout": {"failures": {"on_truncation": "zero"}}},
        'looks at no reward; write "train" or "mask"',
    ),
    ({"takes_negative_totals": False}, KL_IN_REWARD, "credit toy needs totals of 0 or more, which a KL charge"),
    ({"always_zero": True}, {}, "credit toy gives nothing to learn by itself"),
    ({"always_zero": True}, {**TAUGHT, "loss": {"name": "reinforce"}}, "with credit toy the policy loss is zero"),
]


@pytest.mark.parametrize(("facts", "changes", "says"), BY_FACTS, ids=[says for _, _, says in BY_FACTS])
def test_the_record_of_a_new_estimator_decides_what_is_refused(enter_toy, facts, changes, says):
    enter_toy(**facts)
    with pytest.raises(ValueError) as raised:
        check(toy_recipe(**changes))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_record_of_a_new_estimator_decides_what_is_taken(enter_toy):
    enter_toy(compares_attempts=True, zero_for_equal_totals=True)
    check(toy_recipe(filter={"name": "dynamic_sampling"}))
    with pytest.raises(ValueError, match="use it with grpo or maxrl or rloo or toy"):
        check(recipe(credit={"name": "reinforce"}, filter={"name": "dynamic_sampling"}))
    enter_toy(reads_rewards=False)
    check(toy_recipe(**ONE_ATTEMPT))
    enter_toy(always_zero=True, reads_rewards=False)
    check(toy_recipe(**TAUGHT))


def test_a_kl_penalty_reaches_a_new_estimator_as_its_record_says(enter_toy, monkeypatch):
    """By token it gets the coefficient; otherwise it gets groups whose rewards are lower."""
    given = {}

    def by_token(groups, scores, *, kl=0.0):
        given.update(kl=kl, reward=groups[0].trajectories[0].turns[0].reward)
        return [np.zeros(len(turn.action)) for turn in turns_of(groups)]

    groups = [make_group([1.0, 0.0])]
    scores = {"old": [np.full(2, -1.0)] * 2, "reference": [np.full(2, -3.0)] * 2}
    charging = toy_recipe(kl={"coefficient": 0.25, "apply_to": "reward"})
    monkeypatch.setitem(ESTIMATORS, "toy", Estimator(by_token, by_token=True))
    choices.estimate_of(charging)(groups, scores)
    assert given == {"kl": 0.25, "reward": 0.0}
    monkeypatch.setitem(ESTIMATORS, "toy", Estimator(by_token))
    choices.estimate_of(charging)(groups, scores)
    assert given == {"kl": 0.0, "reward": -1.0}


def test_a_new_loss_is_one_record(monkeypatch):
    def twice(logprobs, old, advantages, *, factor: float = 2.0):
        return -factor * advantages * logprobs, {}

    monkeypatch.setitem(LOSSES, "twice", Loss(twice, has_ratio=False))
    check(recipe(loss={"name": "twice", "factor": 3.0}))
    groups, deal = random_groups(3), lambda turns: [turns] if turns else []
    _, once, _ = step(recipe(loss={"name": "reinforce"}), groups, deal)
    _, double, _ = step(recipe(loss={"name": "twice"}), groups, deal)
    for one, two in zip(once, double, strict=True):
        np.testing.assert_allclose(two, 2.0 * one)
    with pytest.raises(ValueError, match="loss.anchor would be ignored: twice has no ratio"):
        check(recipe(loss={"name": "twice", "anchor": "engine"}))
    monkeypatch.setitem(LOSSES, "twice", Loss(twice, of_sequences=True))
    check(recipe(loss={"name": "twice", "scope": "turn"}))
    with pytest.raises(ValueError, match="loss twice needs loss.scope"):
        check(recipe(loss={"name": "twice"}))


def test_a_new_weighting_and_a_new_filter_are_one_record_each(monkeypatch):
    def flat(groups, *, weight: float = 1.0):
        return [np.full(len(turn.action), weight) for turn in turns_of(groups)]

    def large(group, *, at_least: int = 3):
        return len(group.trajectories) >= at_least

    monkeypatch.setitem(WEIGHTINGS, "flat", Weighting(flat))
    monkeypatch.setitem(FILTERS, "large", Filter(large))
    named = recipe(weighting={"name": "flat", "weight": 0.5}, filter={"name": "large"}, **TAUGHT)
    check(named)
    groups = [make_group([0.0, 1.0]), make_group([1.0, 1.0, 1.0])]
    assert {value for values in choices.weighting_of(named)(groups) for value in values} == {0.5}
    assert [choices.keep_of(named)(group) for group in groups] == [False, True]
    monkeypatch.setitem(FILTERS, "large", replace(FILTERS["large"], drops_equal_totals=True))
    with pytest.raises(ValueError, match="filter large would drop groups whose tokens the teacher"):
        check(named)
    with pytest.raises(ValueError, match="filter large would drop groups that still carry signal for reinforce"):
        check(recipe(filter={"name": "large"}, credit={"name": "reinforce"}))


def test_only_attempts_of_the_same_seat_are_compared():
    """Seat 0 has the better position: its loss is worse than the mean, and the win of seat 1 is better than its."""
    totals = [(0, 1.0), (0, 1.0), (0, 1.0), (0, 0.0), (1, 0.0), (1, 0.0), (1, 0.0), (1, 1.0)]
    attempts = [replace(make_trajectory([(3, 2)], outcome=outcome), seat=seat) for seat, outcome in totals]
    chosen = recipe(credit={"name": "grpo", "norm_by_std": False}, weighting={"name": "group_mean"})
    group = Group(make_group([1.0]).task, tuple(attempts))
    credit = [float(of_turn[0]) for of_turn in choices.estimate_of(chosen)([group], {})]
    assert credit == [0.25, 0.25, 0.25, -0.75, -0.25, -0.25, -0.25, 0.75]
    weights = choices.weighting_of(chosen)([group])
    assert np.allclose([of_turn.sum() for of_turn in weights], 1 / 8)


def test_a_group_is_kept_if_one_seat_has_signal():
    chosen = recipe(filter={"name": "dynamic_sampling"}, credit={"name": "grpo"})
    task = make_group([1.0]).task
    for totals, kept in (([(0, 1.0), (0, 1.0), (1, 0.0), (1, 0.0)], False), ([(0, 1.0), (0, 0.0), (1, 0.0)], True)):
        attempts = tuple(replace(make_trajectory([(3, 2)], outcome=outcome), seat=seat) for seat, outcome in totals)
        assert choices.keep_of(chosen)(Group(task, attempts)) is kept
