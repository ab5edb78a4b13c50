import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit.stepping import many, random_scores, random_step, seeds
from support.making import make_group
from turnwise.credit.scope import Sequences, anchor_sequences, anchor_tokens
from turnwise.types import turns_of


def slow_ratios(groups, old, new, scope):
    """[token of the step]: the geometric mean ratio of what the token belongs to."""
    ratios, place = [], 0
    for group in groups:
        for trajectory in group.trajectories:
            changes = []
            for turn in trajectory.turns:
                pairs = zip(new[place], old[place], strict=True)
                changes.append([min(max(float(a) - float(b), -20.0), 20.0) for a, b in pairs])
                assert len(changes[-1]) == len(turn.action)
                place += 1
            together = [change for turn in changes for change in turn]
            for turn in changes:
                pool = turn if scope == "turn" else together
                ratios += [math.exp(sum(pool) / max(1, len(pool)))] * len(turn)
    return ratios


@many
@given(seed=seeds, scope=st.sampled_from(["turn", "trajectory"]))
def test_a_tokens_ratio_is_that_of_its_sequence(seed, scope):
    groups = random_step(seed)
    scores = random_scores(groups, seed)
    old, new = scores["old"], scores["reference"]
    anchors = anchor_sequences(groups, old, lambda: new, scope=scope)
    assert [len(values) for values in anchors] == [len(turn.action) for turn in turns_of(groups)]
    found = [
        math.exp(a - b) for now, anchor in zip(new, anchors, strict=True) for a, b in zip(now, anchor, strict=True)
    ]
    assert found == pytest.approx(slow_ratios(groups, old, new, scope), rel=1e-9)


def test_a_hopeless_change_counts_as_one_of_twenty():
    groups = [make_group([0.0])]
    [anchors] = anchor_sequences(groups, [np.array([-900.0, -1.0])], lambda: [np.array([0.0, -1.0])], scope="turn")
    assert anchors.tolist() == [-10.0, -11.0]


def test_nothing_is_scored_where_nothing_has_moved():
    groups = random_step(3)
    old = random_scores(groups)["old"]
    assert anchor_sequences(groups, old, lambda: old, scope="turn") is old


def test_token_ratios_ask_for_no_scores():
    def never():
        raise AssertionError

    groups = random_step(3)
    old = random_scores(groups)["old"]
    assert anchor_tokens(groups, old, never) is old


@pytest.mark.parametrize("scope", ["turn", "trajectory"])
def test_no_groups(scope):
    assert list(anchor_sequences([], [], lambda: [np.zeros(0)], scope=scope)) == []


def test_a_scope_is_one_of_two():
    with pytest.raises(ValueError, match='write "turn" or "trajectory"'):
        Sequences([], "row")


def test_a_mean_over_no_tokens_is_zero():
    groups = random_step(4, min_groups=2)
    sequences = Sequences(groups, "trajectory")
    size = len(sequences.of_token)
    assert size > 0
    assert not sequences.mean(np.ones(size), np.zeros(size)).any()
