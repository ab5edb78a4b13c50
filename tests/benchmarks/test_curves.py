"""The arms of benchmarks/curves.py: another layout is the same objective, and the fault is the one it says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.making import logprobs_of, make_group, make_model, make_trajectory, make_turn
from support.scripts import script_module
from turnwise.credit.totals import grpo
from turnwise.credit.weighting import token_mean
from turnwise.learn.losses import ppo_clip
from turnwise.learn.policy import Policy
from turnwise.plan.pack import pack
from turnwise.training.loop import Stages
from turnwise.types import Group, Task, turns_of

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def curves():
    with script_module("curves") as module:
        yield module


@pytest.fixture(scope="module")
def policy():
    return Policy(make_model(dtype="float64"), dtype=torch.float64)


@st.composite
def growing_groups(draw):
    """Attempts whose history only grows, some of them with turns in which nothing was sampled."""
    attempts = draw(st.integers(2, 4))
    sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4)
    made = [make_trajectory(draw(sizes), outcome=draw(st.integers(0, 4)), seed=place) for place in range(attempts)]
    return [Group(Task("task", "test"), tuple(made))]


def loss_and_gradient(policy, plans, turns, credit, weights):
    policy.model.zero_grad()
    loss = 0.0
    for plan in plans:
        logprobs, _ = logprobs_of(policy, plan)
        anchor, advantages, weight = (
            torch.tensor(plan.gather(per_turn), dtype=torch.float64)
            for per_turn in ([turn.logprobs for turn in turns], credit, weights)
        )
        total = (ppo_clip(logprobs, anchor, advantages)[0] * weight).sum()
        total.backward()
        loss += float(total.detach())
    gradients = [torch.zeros(1) if p.grad is None else p.grad.flatten() for p in policy.model.parameters()]
    return loss, torch.cat(gradients).numpy().copy()


@settings(max_examples=25, deadline=None)
@given(groups=growing_groups(), budget=st.integers(40, 120))
def test_rows_of_whole_trajectories_give_the_loss_and_the_gradient_of_turns(curves, policy, groups, budget):
    turns = list(turns_of(groups))
    merged, packed = curves.merge(turns, budget), pack(turns, budget)
    placed = [int(turn) for plan in merged for turn in plan.turns]
    assert sorted(placed) == sorted(int(turn) for plan in packed for turn in plan.turns)
    for plan in merged:
        for turn, start, end in zip(plan.turns, plan.offsets[:-1], plan.offsets[1:], strict=True):
            assert plan.tokens[plan.action_nodes[start:end]].tolist() == turns[turn].action.tolist()
    credit, weights = grpo(groups, {}), token_mean(groups)
    loss, gradient = loss_and_gradient(policy, merged, turns, credit, weights)
    expected_loss, expected_gradient = loss_and_gradient(policy, packed, turns, credit, weights)
    assert loss == pytest.approx(expected_loss, abs=TOLERANCE)
    assert np.abs(gradient - expected_gradient).max() <= TOLERANCE


def test_a_row_holds_each_token_of_a_trajectory_once(curves):
    trajectory = make_trajectory([(5, 2), (3, 2), (3, 2)])
    (plan,) = curves.merge(trajectory.turns, 100)
    assert plan.num_tokens == 5 + 2 + 3 + 2 + 3 + 2
    assert plan.turns.tolist() == [0, 1, 2]
    assert plan.action_nodes.tolist() == [5, 6, 10, 11, 15, 16]


def test_two_attempts_that_open_alike_are_two_rows_even_if_nothing_was_sampled(curves):
    opening = make_turn([1, 2, 3], [])
    assert curves.rows_of([opening, opening, make_turn([1, 2, 3, 4], [5])]) == [range(1), range(1, 3)]


def stages(estimate):
    """Stages of which only the estimate matters here."""
    return Stages(**dict.fromkeys(Stages.__dataclass_fields__) | {"estimate": estimate})


def test_rewritten_history_cannot_be_laid_out_as_whole_trajectories(curves):
    attempts = [make_trajectory([(2, 2), (2, 2)], growing=growing) for growing in (True, False)]
    changed = curves.whole_trajectories(stages(grpo), 100)
    changed.estimate([Group(Task("task", "test"), (attempts[0], attempts[0]))], {})
    with pytest.raises(ValueError, match="history that grows"):
        changed.estimate([Group(Task("task", "test"), (attempts[0], attempts[1]))], {})


def test_credit_of_last_turns_is_that_of_all_turns_there_and_zero_elsewhere(curves):
    groups = [make_group([1.0, 0.0, 0.0], num_turns=[3, 1, 2]), make_group([1.0, 1.0], num_turns=[2, 2])]
    ledger = curves.Ledger()
    changed = ledger.watch(curves.last_turns(stages(grpo), 100)).estimate(groups, {})
    last = [False, False, True, True, False, True, False, True, False, True]
    for got, whole, is_last in zip(changed, grpo(groups, {}), last, strict=True):
        np.testing.assert_array_equal(got, whole * is_last)
    assert (ledger.turns, ledger.without_credit) == (10, 7)
    assert (ledger.compared, ledger.compared_without_credit) == (6, 3)
