import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit.stepping import many, random_scores, random_step, seeds
from support.making import make_trajectory, make_turn
from turnwise.credit.correction import Correction
from turnwise.types import Group, Status, Task, Trajectory, turns_of


def inside(ratio, band):
    return band is None or band[0] <= ratio <= band[1]


def slow_factors(groups, old, how):
    """[token of the step]: in the order token mask, truncation, sequence mask."""
    factors, place = [], 0
    for group in groups:
        for trajectory in group.trajectories:
            changes = []
            for turn in trajectory.turns:
                changes.append([float(a) - float(b) for a, b in zip(old[place], turn.logprobs, strict=True)])
                place += 1
            together = [change for turn in changes for change in turn]
            for turn in changes:
                pool = turn if how.scope == "turn" else together
                pool = [change for change in pool if inside(math.exp(change), how.token_band)]
                for change in turn:
                    factor = 1.0 if inside(math.exp(change), how.token_band) else 0.0
                    if how.importance_sampling == "token":
                        factor *= min(math.exp(change), how.importance_ratio_cap)
                    if how.importance_sampling == "sequence":
                        factor *= min(math.exp(min(max(sum(pool), -20), 20)), how.importance_ratio_cap)
                    mean = sum(pool) / len(pool) if pool else 0.0
                    factors.append(factor if inside(math.exp(mean), how.sequence_band) else 0.0)
    return factors


corrections = st.builds(
    Correction,
    importance_sampling=st.sampled_from(["off", "token", "sequence"]),
    importance_ratio_cap=st.sampled_from([0.7, 2.0]),
    token_band=st.sampled_from([None, (0.2, 3.0)]),
    sequence_band=st.sampled_from([None, (0.6, 1.7)]),
    scope=st.sampled_from(["turn", "trajectory"]),
)


@many
@given(seed=seeds, how=corrections)
def test_a_correction_equals_its_definition(seed, how):
    groups = random_step(seed)
    scores = random_scores(groups, seed)
    old, credit = scores["old"], [values.astype(np.float64) for values in scores["values"]]
    corrected, measured = how(groups, credit, old)
    assert [len(values) for values in corrected] == [len(turn.action) for turn in turns_of(groups)]
    wanted = np.concatenate([np.zeros(0), *credit]) * slow_factors(groups, old, how)
    np.testing.assert_allclose(np.concatenate([np.zeros(0), *corrected]), wanted, rtol=1e-9, atol=1e-300)
    assert all(math.isfinite(value) for value in measured.values())


def attempt(*pairs):
    """A one-turn attempt whose (old / engine) ratios are given; and its old logprobs."""
    engine = [-1.0] * len(pairs)
    return make_turn([1], range(1, len(pairs) + 1), logprobs=engine), [-1.0 + math.log(ratio) for ratio in pairs]


def factors_of(how, *pairs):
    turn, old = attempt(*pairs)
    group = Group(Task("t", "test"), (Trajectory((turn,), Status.finished),))
    [factors], measured = how([group], [np.ones(len(pairs))], [np.array(old)])
    return factors.tolist(), measured


def test_a_masked_token_leaves_the_ratio_of_its_sequence():
    how = Correction(importance_sampling="sequence", importance_ratio_cap=10.0, token_band=(0.5, 5.0))
    assert factors_of(how, 100.0, 2.0, 3.0)[0] == pytest.approx([0.0, 6.0, 6.0])
    how = Correction(sequence_band=(0.9, 1.1), token_band=(0.5, 5.0))
    assert factors_of(how, 100.0, 1.05, 1.0)[0] == [0.0, 1.0, 1.0]


def test_token_truncation_caps_and_never_raises():
    factors, measured = factors_of(Correction(importance_sampling="token"), 0.5, 1.0, 7.0)
    assert factors == pytest.approx([0.5, 1.0, 2.0])
    assert measured["correction/capped"] == pytest.approx(1 / 3)
    assert measured["correction/mean"] == pytest.approx(3.5 / 3)


def test_bounds_of_a_band_are_inside():
    assert factors_of(Correction(token_band=(0.0, 1.0)), 1.0)[0] == [1.0]
    assert factors_of(Correction(token_band=(1.0, 2.0)), 1.0)[0] == [1.0]


def test_what_was_masked_and_capped_is_measured():
    masked = Correction(importance_sampling="token", token_band=(0.5, 5.0))
    assert factors_of(masked, 100.0, 3.0, 1.0)[1] == pytest.approx(
        {  # a masked token is not capped as well
            "correction/mean": 1.0,
            "correction/masked_tokens": 1 / 3,
            "correction/masked_by_sequence": 0.0,
            "correction/capped": 1 / 3,
        }
    )
    whole = Correction(importance_sampling="sequence", sequence_band=(0.9, 1.1))
    assert factors_of(whole, 1.5, 1.5)[1] == {  # 2.25 together
        "correction/mean": 0.0,
        "correction/masked_tokens": 0.0,
        "correction/masked_by_sequence": 1.0,
        "correction/capped": 1.0,
    }
    assert (
        factors_of(Correction(importance_sampling="token", importance_ratio_cap=1.0), 1.0)[1]["correction/capped"]
        == 0.0
    )


def test_hopeless_ratios_stay_finite():
    for how in (
        Correction(importance_sampling="token", importance_ratio_cap=1e30),
        Correction(importance_sampling="sequence", importance_ratio_cap=1e30),
    ):
        group = Group(
            Task("t", "test"), (Trajectory((make_turn([1], [2, 3], logprobs=[-900.0, -900.0]),), Status.finished),)
        )
        [factors], _ = how([group], [np.ones(2)], [np.zeros(2)])
        assert factors == pytest.approx([math.exp(20.0)] * 2)
    factors, _ = factors_of(
        Correction(importance_sampling="sequence", importance_ratio_cap=1e30), math.exp(15.0), math.exp(15.0)
    )
    assert factors == pytest.approx([math.exp(20.0)] * 2)


def test_unknown_logprobs_are_refused():
    turn = make_turn([1], [2, 3], logprobs=[-1.0, math.nan])
    group = Group(Task("t", "test"), (Trajectory((turn,), Status.finished),))
    with pytest.raises(ValueError, match="the engine's logprobs, and some are NaN"):
        Correction(importance_sampling="token")([group], [np.ones(2)], [np.zeros(2)])


def test_no_groups():
    corrected, measured = Correction(importance_sampling="sequence", sequence_band=(0.9, 1.1))([], [], [])
    assert corrected == []
    assert measured["correction/mean"] == 1.0


def test_scopes_differ_where_an_attempt_has_several_turns():
    trajectory = make_trajectory([(2, 2), (1, 1)])
    group = Group(Task("t", "test"), (trajectory,))
    old = [turn.logprobs + np.float32(math.log(1.2)) for turn in trajectory.turns]
    by_turn, _ = Correction(importance_sampling="sequence", scope="turn")([group], [np.ones(2), np.ones(1)], old)
    whole, _ = Correction(importance_sampling="sequence", scope="trajectory")([group], [np.ones(2), np.ones(1)], old)
    assert by_turn[0] == pytest.approx([1.44] * 2, rel=1e-5)
    assert by_turn[1] == pytest.approx([1.2], rel=1e-5)
    assert np.concatenate(whole) == pytest.approx([1.728] * 3, rel=1e-5)
    unsaid, _ = Correction(importance_sampling="sequence")([group], [np.ones(2), np.ones(1)], old)
    assert np.concatenate(unsaid).tolist() == np.concatenate(whole).tolist()
