import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit.stepping import fractions, many, nested, random_scores, random_step, seeds
from turnwise.credit.kl_penalty import penalise
from turnwise.credit.temporal import critic_targets, gae, reinforce_pp
from turnwise.types import turns_of


@many
@given(seed=seeds, kl=st.sampled_from([0.1, 2.0]))
def test_every_turn_pays_for_its_own_tokens(seed, kl):
    groups = random_step(seed)
    scores = random_scores(groups, seed)
    paid = penalise(groups, scores, kl)
    assert [len(group.trajectories) for group in paid] == [len(group.trajectories) for group in groups]
    rows = zip(turns_of(groups), turns_of(paid), scores["old"], scores["reference"], strict=True)
    for before, after, old, reference in rows:
        owed = kl * math.fsum(float(a) - float(b) for a, b in zip(old, reference, strict=True))
        assert after.reward == pytest.approx(before.reward - owed, abs=1e-9)
        assert after.action is before.action or np.array_equal(after.action, before.action)
    for one, other in zip(groups, paid, strict=True):
        assert [t.outcome for t in one.trajectories] == [t.outcome for t in other.trajectories]
        assert one.failed == other.failed


@many
@given(seed=seeds, gamma=fractions, lam=fractions)
def test_by_turn_gae_charges_as_if_the_rewards_were_less(seed, gamma, lam):
    groups = random_step(seed)
    scores = random_scores(groups, seed)
    how = {"gamma": gamma, "lam": lam, "unit": "turn"}
    for estimate, more in ((gae, {"whiten": False}), (critic_targets, {})):
        found = estimate(groups, scores, kl=0.3, **how, **more)
        wanted = estimate(penalise(groups, scores, 0.3), scores, **how, **more)
        # An empty turn's charge is nothing, so that only rounding may differ.
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)


@many
@given(seed=seeds)
def test_by_token_a_charge_does_not_reach_tokens_after_it(seed):
    """Undiscounted and with lam 1, credit is what is still to come: a token's own charge and those after it."""
    groups = random_step(seed)
    scores = random_scores(groups, seed)
    with_kl = nested(groups, gae(groups, scores, kl=0.5, whiten=False))
    without = nested(groups, gae(groups, scores, whiten=False))
    ratios = nested(groups, [a.astype(np.float64) - b for a, b in zip(scores["old"], scores["reference"], strict=True)])
    for attempts, free, of_group in zip(with_kl, without, ratios, strict=True):
        for one, other, change in zip(attempts, free, of_group, strict=True):
            flat = np.concatenate([np.zeros(0), *change])
            owed = 0.5 * np.cumsum(flat[::-1])[::-1]
            difference = np.concatenate([np.zeros(0), *other]) - np.concatenate([np.zeros(0), *one])
            np.testing.assert_allclose(difference, owed, rtol=0, atol=1e-6)


@pytest.mark.parametrize("estimate", [gae, reinforce_pp])
def test_a_charge_needs_a_reference(estimate):
    groups = random_step(5, min_groups=2)
    scores = random_scores(groups)
    del scores["reference"]
    with pytest.raises(ValueError, match='needs scores\\["reference"\\]'):
        estimate(groups, scores, kl=0.1)
