import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from making import few
from turnwise.learn.losses import LOG_RATIO_LIMIT, LOSSES, likelihood, log_ratio, ppo_clip


def obvious_ppo(logprob, old, advantage, low, high):
    """(term, its derivative by logprob, whether it is clipped) of one token."""
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        clipped = ratio > 1 + high
        term = -advantage * min(ratio, 1 + high)
    else:
        clipped = ratio < 1 - low
        term = -advantage * max(ratio, 1 - low)
    clipped = clipped and advantage != 0
    return term, 0.0 if clipped else -advantage * ratio, clipped


def run(logprobs, old, advantages, **bounds):
    logprobs = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    old, advantages = (torch.tensor(x, dtype=torch.float64) for x in (old, advantages))
    terms, measured = ppo_clip(logprobs, old, advantages, **bounds)
    terms.sum().backward()
    return terms.detach(), logprobs.grad, measured


token = st.tuples(st.floats(-6, 0), st.floats(-1.5, 1.5), st.floats(-3, 3))


@few
@given(st.lists(token, min_size=1, max_size=8), st.floats(0.01, 0.9), st.floats(0.01, 2.0))
def test_ppo_clip_equals_its_definition(tokens, low, high):
    def far_from_a_bound(change):
        return all(abs(math.exp(change) - bound) > 1e-9 for bound in (1 - low, 1 + high))

    tokens = [(logprob, change, advantage) for logprob, change, advantage in tokens if far_from_a_bound(change)]
    logprobs = [logprob for logprob, _, _ in tokens]
    old = [logprob - change for logprob, change, _ in tokens]
    advantages = [advantage for _, _, advantage in tokens]
    terms, gradient, measured = run(logprobs, old, advantages, clip_low=low, clip_high=high)
    for place in range(len(tokens)):
        term, slope, clipped = obvious_ppo(logprobs[place], old[place], advantages[place], low, high)
        assert float(terms[place]) == pytest.approx(term, rel=1e-12, abs=1e-12)
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-12, abs=1e-12)
        # A product with the least of advantages may be the same number on both sides of the bound.
        if abs(advantages[place]) > 1e-9:
            assert bool(measured["clipped"][place]) == clipped
        assert float(measured["ratio"][place]) == pytest.approx(math.exp(logprobs[place] - old[place]), rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 1.0, -1.25, -1.25),  # between the bounds: 1 + 0.1 would have clipped it
        (1.35, 1.0, -1.3, 0.0),
        (1.35, -1.0, 1.35, 1.35),  # going the wrong way is never clipped
        (0.95, -1.0, 0.95, 0.95),
        (0.85, -1.0, 0.9, 0.0),
        (0.85, 1.0, -0.85, -0.85),
    ],
)
def test_each_side_has_its_own_bound(ratio, advantage, term, slope):
    terms, gradient, _ = run([math.log(ratio) - 2.0], [-2.0], [advantage], clip_low=0.1, clip_high=0.3)
    assert float(terms[0]) == pytest.approx(term, abs=1e-12)
    assert float(gradient[0]) == pytest.approx(slope, abs=1e-12)


def test_the_first_update_has_ratio_one_and_the_plain_policy_gradient():
    logprobs, advantages = [-0.5, -3.0, -1.0], [1.0, -2.0, 0.0]
    _, gradient, measured = run(logprobs, logprobs, advantages)
    assert measured["ratio"].tolist() == [1.0] * 3
    assert measured["clipped"].tolist() == [0.0] * 3
    assert gradient.tolist() == [-1.0, 2.0, 0.0]


def test_terms_are_per_token_and_nobody_averages():
    together, _, _ = run([-1.0, -2.0], [-1.1, -2.2], [1.0, -1.0])
    apart = [float(run([a], [b], [c])[0][0]) for a, b, c in ((-1.0, -1.1, 1.0), (-2.0, -2.2, -1.0))]
    assert together.tolist() == apart


def test_log_ratios_are_bounded():
    change = log_ratio(torch.tensor([0.0, -50.0, 0.0]), torch.tensor([-50.0, 0.0, -math.inf]))
    assert change.tolist() == [LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT]
    terms, gradient, _ = run([-0.1, -0.1], [-1000.0, -math.inf], [-1.0, 1.0])
    assert torch.isfinite(terms).all()
    assert torch.isfinite(gradient).all()


def test_likelihood_is_minus_the_logprob_and_takes_unknown_old_ones():
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    terms, measured = likelihood(logprobs, torch.tensor([math.nan, math.nan]), torch.tensor([1.0, 0.5]))
    terms.sum().backward()
    assert terms.tolist() == [0.5, 1.0]
    assert logprobs.grad.tolist() == [-1.0, -0.5]
    assert measured == {}


def test_losses_by_name():
    assert LOSSES["ppo_clip"] is ppo_clip
    assert "likelihood" not in LOSSES, "it is for demonstrations and ignores the old policy"
