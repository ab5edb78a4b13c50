"""Normalisation is data: loss and gradient do not depend on how turns are laid out. In float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.making import group_lists, make_learner, make_model
from turnwise.credit.estimators import ESTIMATORS
from turnwise.credit.weighting import WEIGHTINGS
from turnwise.learn.losses import ppo_clip
from turnwise.learn.objective import Objective
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack
from turnwise.types import turns_of

TOLERANCE = 1e-12
mini_batches = group_lists(min_groups=1, max_groups=3, max_attempts=3, max_turns=3)


@pytest.fixture(scope="module")
def learner():
    """With a learning rate of nothing, so that every example meets the same weights, and gradients as they come."""
    return make_learner(make_model(dtype="float64"), learning_rate=0.0, clip_norm=1e9, dtype=torch.float64)


def credit_and_weights(groups, estimator, weighting):
    return ESTIMATORS[estimator].function(groups, {}), WEIGHTINGS[weighting].function(groups)


def loss_and_gradient(learner, plans, turns, credit, weights):
    metrics, _ = learner.update(plans, credit, weights, {"old": [turn.logprobs for turn in turns]}, Objective(ppo_clip))
    parameters = learner.policy.model.named_parameters()
    gradient = {name: np.zeros(1) if p.grad is None else p.grad.numpy().copy() for name, p in parameters}
    return {name: metrics[name] for name in metrics if name not in ("learning_rate", "skipped")}, gradient


def assert_equal(one, other):
    for name in one[0].keys() | other[0].keys():
        assert one[0].get(name, 0.0) == pytest.approx(other[0].get(name, 0.0), abs=TOLERANCE)
    for name in one[1]:
        assert np.abs(one[1][name] - other[1][name]).max() <= TOLERANCE, name


def longest(turns):
    return max((len(turn.prompt) + len(turn.action) for turn in turns if len(turn.action)), default=1)


# Those that need no scores of other models and take any totals.
alone = [name for name, record in sorted(ESTIMATORS.items()) if not record.needs and record.takes_negative_totals]
layouts = st.sampled_from([pack, cut])
choices = {"estimator": st.sampled_from(alone), "weighting": st.sampled_from(sorted(WEIGHTINGS))}


@settings(max_examples=25, deadline=None)
@given(groups=mini_batches, more=st.integers(0, 40), **choices)
def test_the_packing_budget_changes_neither_loss_nor_gradient(learner, groups, more, estimator, weighting):
    turns = list(turns_of(groups))
    credit, weights = credit_and_weights(groups, estimator, weighting)
    whole = loss_and_gradient(learner, pack(turns, 10_000), turns, credit, weights)
    assert_equal(loss_and_gradient(learner, pack(turns, longest(turns) + more), turns, credit, weights), whole)


@settings(max_examples=25, deadline=None)
@given(groups=mini_batches, budgets=st.lists(st.integers(2, 80), min_size=1, max_size=3), **choices)
def test_a_tree_cut_to_any_budget_changes_neither_loss_nor_gradient(learner, groups, budgets, estimator, weighting):
    turns = list(turns_of(groups))
    credit, weights = credit_and_weights(groups, estimator, weighting)
    whole = loss_and_gradient(learner, pack(turns, 10_000), turns, credit, weights)
    for budget in (*budgets, 10_000):
        assert_equal(loss_and_gradient(learner, cut(turns, budget), turns, credit, weights), whole)


@settings(max_examples=25, deadline=None)
@given(groups=mini_batches, random=st.randoms(use_true_random=False), layout=layouts, **choices)
def test_any_split_into_passes_gives_the_same_sum(learner, groups, random, layout, estimator, weighting):
    """Micro-batches: turns dealt at random into passes of their own, in random order."""
    turns = list(turns_of(groups))
    credit, weights = credit_and_weights(groups, estimator, weighting)
    whole = loss_and_gradient(learner, pack(turns, 10_000), turns, credit, weights)
    hands = [[], [], []]
    for turn in range(len(turns)):
        random.choice(hands).append(turn)
    plans = []
    for hand in hands:
        for plan in layout([turns[turn] for turn in hand], 10_000):
            object.__setattr__(plan, "turns", np.array(hand)[plan.turns])
            plans.append(plan)
    random.shuffle(plans)
    assert_equal(loss_and_gradient(learner, plans, turns, credit, weights), whole)


@settings(max_examples=25, deadline=None)
@given(groups=mini_batches, data=st.data(), layout=layouts, **choices)
def test_the_order_of_groups_changes_neither_loss_nor_gradient(learner, groups, data, layout, estimator, weighting):
    def result(groups):
        turns = list(turns_of(groups))
        return loss_and_gradient(
            learner, layout(turns, longest(turns) + 20), turns, *credit_and_weights(groups, estimator, weighting)
        )

    order = data.draw(st.permutations(groups))
    assert_equal(result(order), result(groups))


def test_the_examples_above_have_something_to_tell_apart(learner):
    """A gradient that is not zero, and that is another one when credit lands on the wrong turns."""
    from support.making import make_group

    groups = [make_group([0.0, 1.0], num_turns=[2, 1]), make_group([0.5, 0.25, 0.0])]
    turns = list(turns_of(groups))
    credit, weights = credit_and_weights(groups, "grpo", "trajectory_mean")
    right = loss_and_gradient(learner, pack(turns, 10_000), turns, credit, weights)
    wrong = loss_and_gradient(learner, pack(turns, 10_000), turns, credit[::-1], weights)
    assert right[0]["gradient_norm"] > 1e-2
    with pytest.raises(AssertionError):
        assert_equal(wrong, right)


@settings(max_examples=50, deadline=None)
@given(groups=group_lists(min_groups=2, max_groups=4), data=st.data(), **choices)
def test_permuting_groups_permutes_credit_and_weights(groups, data, estimator, weighting):
    order = data.draw(st.permutations(range(len(groups))))
    ends = np.cumsum([len(list(turns_of([group]))) for group in groups])

    def by_group(values, groups):
        sizes = [len(list(turns_of([group]))) for group in groups]
        return [values[end - size : end] for end, size in zip(np.cumsum(sizes), sizes, strict=True)]

    shuffled = [groups[place] for place in order]
    assert ends[-1] == len(list(turns_of(shuffled)))
    both = [credit_and_weights(which, estimator, weighting) for which in (groups, shuffled)]
    for straight, other in zip(*both, strict=True):
        parts, moved = by_group(straight, groups), by_group(other, shuffled)
        for place, group in enumerate(order):
            for one, two in zip(moved[place], parts[group], strict=True):
                np.testing.assert_allclose(one, two, rtol=0, atol=TOLERANCE)
