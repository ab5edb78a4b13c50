"""Loss and gradient with respect to logprobs are the same however turns are laid out: for every estimator with every
loss, with weighting, scope, anchor, truncation, KL, entropy and correction drawn. Whole training steps, in float64.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties.tabular import random_groups, recipe_of, step
from turnwise.assemble import objective as choices
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.weighting import WEIGHTINGS
from turnwise.learn.losses import LOSSES
from turnwise.types import Group, Trajectory, turns_of

TOLERANCE = 1e-12
OF_SEQUENCES = [name for name, loss in LOSSES.items() if loss.of_sequences]
SCOPED = [f"{name}/{scope}" for name in OF_SEQUENCES for scope in ("turn", "trajectory")]
EVERY_LOSS = sorted(set(LOSSES) - set(OF_SEQUENCES)) + SCOPED
PAIRS = [(estimator, loss) for estimator in ESTIMATORS for loss in EVERY_LOSS]
few = settings(max_examples=4, deadline=None)
"""Four examples for each of the seventy-seven pairs."""


@st.composite
def rests(draw, estimator, loss):
    """What a recipe says beside estimator and loss, and fits them."""
    changes = {
        "weighting": {"name": draw(st.sampled_from(sorted(WEIGHTINGS)))},
        "rollout": {"failures": {"on_truncation": draw(st.sampled_from(["train", "mask", "zero"]))}},
        "entropy": draw(st.sampled_from([0.0, 0.1])),
        "kl": draw(st.sampled_from([{}, {"coefficient": 0.2, "divergence": "k2"}, {"coefficient": 0.2}])),
    }
    record = ESTIMATORS[estimator]
    if record.reads_rewards and record.takes_negative_totals and draw(st.booleans()):
        changes["kl"] = {"coefficient": 0.2, "apply_to": "reward"}
    corrections = [
        {},
        {"importance_sampling": "token", "importance_ratio_cap": 1.1},
        {"importance_sampling": "sequence", "scope": "turn", "importance_ratio_cap": 1.1, "token_band": [0.7, 1.5]},
        {"importance_sampling": "sequence", "importance_ratio_cap": 1.1, "sequence_band": [0.9, 1.2]},
    ]
    changes["correction"] = draw(st.sampled_from(corrections))
    return recipe_of(estimator, loss, **changes)


def together(turns):
    return [turns] if turns else []


def apart(turns):
    return [[turn] for turn in turns]


def dealt(random):
    """Turns dealt into up to five passes, through attempts and groups, in any order."""

    def deal(turns):
        hands = [[] for _ in range(5)]
        for turn in turns:
            random.choice(hands).append(turn)
        for hand in hands:
            random.shuffle(hand)
        random.shuffle(hands)
        return [hand for hand in hands if hand]

    return deal


def assert_same(one, other, tolerance=TOLERANCE):
    assert one[0].keys() == other[0].keys()
    for name in one[0]:
        assert one[0][name] == pytest.approx(other[0][name], rel=tolerance, abs=tolerance), name
    for left, right in ((one[1], other[1]), (one[2], other[2])):
        for mine, yours in zip(left, right, strict=True):
            np.testing.assert_allclose(mine, yours, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
@few
@given(seed=st.integers(0, 9999), random=st.randoms(use_true_random=False), data=st.data())
def test_rows_passes_and_cuts_change_nothing(estimator, loss, seed, random, data):
    recipe = data.draw(rests(estimator, loss))
    groups = random_groups(seed)
    whole = step(recipe, groups, together, seed=seed)
    assert_same(step(recipe, groups, dealt(random), seed=seed), whole)
    assert_same(step(recipe, groups, apart, seed=seed), whole)


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
@few
@given(seed=st.integers(0, 9999), data=st.data())
def test_the_order_of_groups_changes_nothing(estimator, loss, seed, data):
    recipe = data.draw(rests(estimator, loss))
    groups = random_groups(seed)
    order = data.draw(st.permutations(groups))
    assert_same(step(recipe, order, together, seed=seed), step(recipe, groups, together, seed=seed))


@pytest.mark.parametrize("loss", EVERY_LOSS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999), random=st.randoms(use_true_random=False), data=st.data())
def test_several_updates_on_moving_weights_change_nothing(loss, seed, random, data):
    """Here the ratios of later updates are not 1, and those of sequences come from a pass of their own."""
    recipe = data.draw(rests("grpo", loss))
    groups = random_groups(seed, max_groups=1) + renumbered(random_groups(seed + 1, max_groups=1), seed)
    whole = step(recipe, groups, together, seed=seed, updates=2, learning_rate=0.03)
    # Adam divides a gradient by its size: rounding of one that is nearly nothing moves a logprob a little.
    assert_same(step(recipe, groups, dealt(random), seed=seed, updates=2, learning_rate=0.03), whole, 1e-8)


def renumbered(groups, seed):
    """The groups with turns numbered on after those of `random_groups(seed, max_groups=1)`."""
    first = len(list(turns_of(random_groups(seed, max_groups=1))))
    return [
        Group(
            group.task,
            tuple(
                Trajectory(tuple(moved(turn, first) for turn in attempt.turns), attempt.status, attempt.outcome)
                for attempt in group.trajectories
            ),
        )
        for group in groups
    ]


def moved(turn, by):
    return replace(turn, prompt=turn.prompt + by)


def test_the_examples_above_have_something_to_tell_apart():
    """Ratios that differ by scope, credit that differs by turn, gradients that are not nothing."""
    found = {}
    for loss in EVERY_LOSS:
        for estimator in ("grpo", "reward_to_go"):
            _, gradients, _ = step(recipe_of(estimator, loss), random_groups(7), together)
            found[estimator, loss] = np.concatenate([gradient[0] for gradient in gradients])
            assert np.abs(found[estimator, loss]).max() > 1e-3
    keys = list(found)
    for place, one in enumerate(keys):
        for other in keys[:place]:
            assert np.abs(found[one] - found[other]).max() > 1e-9, (one, other)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 9999), random=st.randoms(use_true_random=False))
def test_every_sampled_token_is_trained_exactly_once_and_nothing_else_is(seed, random):
    """With credit and weight 1 the plain policy gradient of a token is minus the number of times it is trained."""
    recipe = recipe_of("reinforce", "reinforce")
    groups = random_groups(seed)
    ones = lambda groups, *_: [np.ones(len(turn.action)) for turn in turns_of(groups)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "estimate_of", lambda recipe: ones)
        patch.setattr(choices, "weighting_of", lambda recipe: ones)
        _, gradients, _ = step(recipe, groups, dealt(random))
    trained = sum(int((gradient[0] == -1.0).sum()) for gradient in gradients)
    assert trained == sum(len(turn.action) for turn in turns_of(groups))
    for gradient in gradients:
        assert (gradient[0] == -1.0).all()
        assert not gradient[1].any()
