"""Merging turns into rows, which changed the objective.

Elsewhere turns whose prompts extend each other were merged into one row to save computation, and three things changed
with the rows: a mean over sequences became one over other sequences, a sequence's ratio that of another sequence, and
the return of an attempt, read off its last row, gained the rewards of the turns that were merged into it.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from support.making import gradients, make_learner, make_model, make_trajectory
from turnwise.credit.returns import concatenate
from turnwise.credit.scope import anchor_sequences, anchor_tokens
from turnwise.credit.temporal import reward_to_go
from turnwise.credit.totals import grpo
from turnwise.credit.weighting import WEIGHTINGS, trajectory_mean, turn_mean
from turnwise.learn.losses import gspo, ppo_clip
from turnwise.learn.objective import Objective
from turnwise.plan.plan import Plan
from turnwise.tokens import extends
from turnwise.types import Group, Status, Task, Trajectory, turns_of

TOLERANCE = 1e-12
RATIOS: dict[str, Any] = {
    "token": (ppo_clip, anchor_tokens),
    "gspo turn": (gspo, partial(anchor_sequences, scope="turn")),
    "gspo trajectory": (gspo, partial(anchor_sequences, scope="trajectory")),
}


def two_groups():
    """Attempts that are paid on the way; most only grow, one begins anew at its second turn and grows from there."""
    growing = make_trajectory([(4, 3), (2, 5), (3, 2)], rewards=[0.25, 0.5, 0.0], outcome=1.0, seed=1)
    short = make_trajectory([(4, 2), (3, 4)], rewards=[-0.5, 0.125], outcome=0.0, seed=2)
    single = make_trajectory([(5, 6)], rewards=[0.5], outcome=0.5, seed=3)
    begun = make_trajectory([(6, 3)], rewards=[0.75], seed=4)
    anew = make_trajectory([(2, 2), (1, 3)], rewards=[0.0, -0.25], seed=5)
    windowed = Trajectory((*begun.turns, *anew.turns), Status.finished, 1.0)
    return [Group(Task("a", "test"), (growing, short)), Group(Task("b", "test"), (single, windowed))]


def rows_of_turns(groups):
    """A row for every turn."""
    return [[place] for place in range(len(list(turns_of(groups))))]


def merged_rows(groups):
    """Rows of as many turns as extend each other."""
    rows, place = [], 0
    for group in groups:
        for trajectory in group.trajectories:
            for number, turn in enumerate(trajectory.turns):
                if number and extends(turn, trajectory.turns[number - 1]):
                    rows[-1].append(place)
                else:
                    rows.append([place])
                place += 1
    return rows


def plan_of(turns, rows):
    """A chain for each row: the tokens of its last turn, with the actions of all its turns in their places."""
    tokens, starts, chosen, nodes = [], [], [], []
    for row in rows:
        start, last = len(tokens), turns[row[-1]]
        tokens.extend([*last.prompt, *last.action])
        starts.append(start)
        for place in row:
            turn = turns[place]
            chosen.append(place)
            nodes.append(start + len(turn.prompt) + np.arange(len(turn.action)))
    lengths = np.diff([*starts, len(tokens)])
    depth = np.arange(len(tokens)) - np.repeat(starts, lengths)
    return Plan(
        tokens=np.array(tokens, np.int32),
        depth=depth.astype(np.int32),
        parent=np.where(depth == 0, -1, np.arange(len(tokens)) - 1).astype(np.int32),
        exit=np.repeat(np.add(starts, lengths), lengths).astype(np.int32),
        turns=np.array(chosen, np.int64),
        offsets=np.cumsum([0, *map(len, nodes)]),
        action_nodes=np.concatenate(nodes),
    )


@dataclass(frozen=True)
class Turnwise:
    """What a step makes of groups, whatever their rows: weights, credit and anchors come before them."""

    weigh: str
    ratio: str

    def weights(self, groups, rows):
        return WEIGHTINGS[self.weigh].function(groups)

    def credit(self, groups, rows):
        return reward_to_go(groups, {})

    def anchor(self, groups, rows, old, now):
        return RATIOS[self.ratio][1](groups, old, lambda: now)


class MeanOverRows(Turnwise):
    """The mean of each sequence, then over sequences, where a sequence is a row."""

    def weights(self, groups, rows):
        turns = list(turns_of(groups))
        weights = [np.zeros(0)] * len(turns)
        for row in rows:
            size = sum(len(turns[place].action) for place in row)
            for place in row:
                weights[place] = np.full(len(turns[place].action), 1.0 / (len(rows) * size))
        return weights


class RatioOverRows(Turnwise):
    """A sequence's ratio, where a sequence is a row."""

    def anchor(self, groups, rows, old, now):
        anchors = list(old)
        for row in rows:
            mean = np.mean(concatenate([now[place] for place in row]) - concatenate([old[place] for place in row]))
            for place in row:
                anchors[place] = now[place] - mean
        return anchors


class ReturnOfTheLastRow(Turnwise):
    """The return of an attempt is what stands in its last row."""

    def credit(self, groups, rows):
        last_row = {row[-1]: row for row in rows}
        place, paid = 0, []
        for group in groups:
            attempts = []
            for trajectory in group.trajectories:
                place += len(trajectory.turns)
                merged = len(last_row[place - 1])
                unseen = sum(turn.reward for turn in trajectory.turns[:-merged])
                attempts.append(replace(trajectory, outcome=trajectory.outcome - unseen))
            paid.append(Group(group.task, tuple(attempts)))
        return grpo(paid, {})


@pytest.fixture(scope="module")
def learner():
    """In float64, with a learning rate of nothing, so that every layout meets the same weights."""
    return make_learner(make_model(dtype="float64"), learning_rate=0.0, clip_norm=1e9, dtype=torch.float64)


def loss_and_gradient(learner, objective, groups, rows):
    """Of one update on groups laid out in rows."""
    turns = list(turns_of(groups))
    plans = [plan_of(turns, rows)]
    now = learner.score(plans, len(turns))
    # The old policy is near: some ratios are clipped, by either loss, and others are not.
    nearness = 0.2 if objective.ratio == "token" else 3e-3
    random = np.random.default_rng(0)
    old = [values + random.normal(0.0, nearness, len(turn.action)) for values, turn in zip(now, turns, strict=True)]
    told = {"old": objective.anchor(groups, rows, old, now)}
    loss = Objective(RATIOS[objective.ratio][0])
    credit, weights = objective.credit(groups, rows), objective.weights(groups, rows)
    metrics, _ = learner.update(plans, credit, weights, told, loss)
    return metrics, gradients(learner.policy.model)


def check_merging_changes_nothing(learner, objective):
    """Loss and gradient are the same for a row per turn and for merged rows."""
    groups = two_groups()
    apart, merged = rows_of_turns(groups), merged_rows(groups)
    assert (len(apart), len(merged)) == (9, 5)
    metrics, wanted = loss_and_gradient(learner, objective, groups, apart)
    other, found = loss_and_gradient(learner, objective, groups, merged)
    assert metrics["gradient_norm"] > 1e-3
    assert 0.0 < metrics["clipped"] < 1.0
    assert abs(other["loss"] - metrics["loss"]) <= TOLERANCE, "merging has changed the loss"
    worst = max(np.abs(found[name] - wanted[name]).max() for name in wanted)
    assert worst <= TOLERANCE, f"merging has changed the gradient by {worst:.1e}"


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_merging_changes_neither_loss_nor_gradient(learner, weighting, ratio):
    check_merging_changes_nothing(learner, Turnwise(weighting, ratio))


@pytest.mark.parametrize("ratio", ["token", "gspo turn"])
def test_a_mean_over_rows_is_caught(learner, ratio):
    with pytest.raises(AssertionError, match="merging has changed"):
        check_merging_changes_nothing(learner, MeanOverRows("none", ratio))


@pytest.mark.parametrize("weighting", ["token_mean", "trajectory_mean"])
def test_a_ratio_over_rows_is_caught(learner, weighting):
    with pytest.raises(AssertionError, match="merging has changed"):
        check_merging_changes_nothing(learner, RatioOverRows(weighting, "gspo turn"))


def test_a_return_of_the_last_row_is_caught(learner):
    with pytest.raises(AssertionError, match="merging has changed"):
        check_merging_changes_nothing(learner, ReturnOfTheLastRow("trajectory_mean", "token"))


def test_each_layout_alone_looked_right():
    """Where every attempt is one row, a mean over rows is that over trajectories and a ratio over rows that of
    trajectories; where every turn is one, both are those of turns."""
    groups = [two_groups()[0]]
    random = np.random.default_rng(0)
    old, now = ([random.normal(-2.0, 0.1, len(turn.action)) for turn in turns_of(groups)] for _ in range(2))
    for rows, mean, ratio in (
        (rows_of_turns(groups), turn_mean, "gspo turn"),
        (merged_rows(groups), trajectory_mean, "gspo trajectory"),
    ):
        weights = MeanOverRows("none", ratio).weights(groups, rows)
        np.testing.assert_allclose(concatenate(weights), concatenate(mean(groups)), rtol=1e-12)
        anchors = (kind("none", ratio).anchor(groups, rows, old, now) for kind in (RatioOverRows, Turnwise))
        found, wanted = map(concatenate, anchors)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
