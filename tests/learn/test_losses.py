import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.making import few
from turnwise.credit.scope import LOG_RATIO_LIMIT
from turnwise.learn.losses import LOSSES, likelihood, log_ratio, ppo_clip


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


def test_terms_are_per_token_and_not_averaged():
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
    assert LOSSES["ppo_clip"].function is ppo_clip
    assert "likelihood" not in LOSSES, "it is for demonstrations and ignores the old policy"


# ---------------------------------------------------------------- the others


def slope_and_term(loss, logprob, old, advantage, **settings):
    """(term, its derivative by logprob, measurements) of one token."""
    leaf = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    terms, measured = loss(leaf, *(torch.tensor([x], dtype=torch.float64) for x in (old, advantage)), **settings)
    terms.sum().backward()
    return float(terms[0]), float(leaf.grad[0]), {name: float(values[0]) for name, values in measured.items()}


def slow_dual_clip(logprob, old, advantage):
    ratio = math.exp(logprob - old)
    term, slope, _ = obvious_ppo(logprob, old, advantage, 0.2, 0.2)
    return (-advantage * 3.0, 0.0) if advantage < 0 and ratio > 3.0 else (term, slope)


def slow_gspo(logprob, old, advantage):
    return obvious_ppo(logprob, old, advantage, 3e-4, 4e-4)[:2]


def slow_reinforce(logprob, old, advantage):
    return -advantage * logprob, -advantage


def slow_cispo(logprob, old, advantage):
    bounded = min(max(math.exp(logprob - old), 0.5), 1.25)
    return -advantage * bounded * logprob, -advantage * bounded


def slow_sapo(logprob, old, advantage):
    sharpness, ratio = (2.0 if advantage > 0 else 3.0), math.exp(logprob - old)
    gate = 1.0 / (1.0 + math.exp(-sharpness * (ratio - 1.0)))
    return -advantage * 4.0 / sharpness * gate, -advantage * 4.0 * gate * (1.0 - gate) * ratio


def slow_dppo(logprob, old, advantage, divergence):
    p, q, ratio = math.exp(old), math.exp(logprob), math.exp(logprob - old)
    moved = {
        "tv": abs(p - q),
        "kl": p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 and q < 1 else 0.0,
    }[divergence]
    away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
    return (0.0, 0.0) if moved > 0.05 and away else (-advantage * ratio, -advantage * ratio)


SLOW: dict[str, Any] = {
    "dual clip": (ppo_clip, {"dual_clip": 3.0}, slow_dual_clip),
    "gspo": (LOSSES["gspo"].function, {}, slow_gspo),
    "reinforce": (LOSSES["reinforce"].function, {}, slow_reinforce),
    "cispo": (LOSSES["cispo"].function, {"clip_low": 0.5, "clip_high": 0.25}, slow_cispo),
    "sapo": (LOSSES["sapo"].function, {"temperature_positive": 2.0, "temperature_negative": 3.0}, slow_sapo),
    "dppo": (LOSSES["dppo"].function, {"limit": 0.05}, partial(slow_dppo, divergence="tv")),
    "dppo kl": (
        LOSSES["dppo"].function,
        {"limit": 0.05, "divergence": "kl"},
        partial(slow_dppo, divergence="kl"),
    ),
}


@pytest.mark.parametrize("name", SLOW)
@given(st.floats(-4, -0.02), st.floats(-1.5, 1.5), st.floats(-3, 3))
@settings(max_examples=200, deadline=None)
def test_a_loss_equals_its_definition(name, logprob, change, advantage):
    loss, arguments, slow = SLOW[name]
    old = min(logprob - change, -1e-3)
    for nudge in (0.0, 1e-7):  # at a bound either side may be taken
        term, slope = slow(logprob + nudge, old, advantage)
        found = slope_and_term(loss, logprob, old, advantage, **arguments)
        if found[0] == pytest.approx(term, rel=1e-9, abs=1e-6) and found[1] == pytest.approx(slope, rel=1e-5, abs=1e-6):
            return
    raise AssertionError((found, term, slope))


@pytest.mark.parametrize("name", LOSSES)
@given(st.floats(-4, -0.02), st.floats(-1.5, 1.5), st.floats(-3, 3), st.floats(0, 5))
@settings(max_examples=50, deadline=None)
def test_a_loss_scales_with_the_advantage(name, logprob, change, advantage, factor):
    """So that an off-policy correction may be a factor on credit."""
    old = logprob - change
    term, slope, _ = slope_and_term(LOSSES[name].function, logprob, old, advantage)
    scaled, scaled_slope, _ = slope_and_term(LOSSES[name].function, logprob, old, advantage * factor)
    assert scaled == pytest.approx(term * factor, rel=1e-9, abs=1e-12)
    assert scaled_slope == pytest.approx(slope * factor, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 1.5])
def test_on_policy_every_loss_has_the_policy_gradient(name, advantage):
    _, slope, measured = slope_and_term(LOSSES[name].function, -0.7, -0.7, advantage)
    assert slope == pytest.approx(-advantage, rel=1e-12)
    assert measured["ratio"] == 1.0
    assert measured.get("clipped", 0.0) == 0.0


def test_cispo_keeps_the_gradient_where_ppo_clips_it():
    assert slope_and_term(ppo_clip, -0.5, -2.5, 1.0)[1] == 0.0
    term, slope, measured = slope_and_term(LOSSES["cispo"].function, -0.5, -2.5, 1.0)
    assert (term, slope, measured["clipped"]) == (2.5, -5.0, 1.0)


def test_dual_clip_bounds_what_a_negative_advantage_can_do():
    free = slope_and_term(ppo_clip, -0.1, -5.1, -1.0)
    bound = slope_and_term(ppo_clip, -0.1, -5.1, -1.0, dual_clip=3.0)
    assert free[1] > 100
    assert (bound[0], bound[1], bound[2]["clipped"]) == (3.0, 0.0, 1.0)


@pytest.mark.parametrize("name", sorted(name for name, loss in LOSSES.items() if loss.has_ratio))
def test_hopeless_ratios_stay_finite(name):
    for logprob, old in ((-0.1, -1000.0), (-1000.0, -0.1), (-0.0, -0.0), (-1e-12, -800.0)):
        for advantage in (-1.0, 1.0):
            term, slope, _ = slope_and_term(LOSSES[name].function, logprob, old, advantage)
            assert math.isfinite(term)
            assert math.isfinite(slope)


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("ppo_clip", {"clip_low": -0.1}, "loss.clip_low of ppo_clip must be 0 or more"),
        ("ppo_clip", {"dual_clip": 0.5}, "loss.dual_clip must be over 1"),
        ("gspo", {"clip_high": -1.0}, "loss.clip_high of gspo must be 0 or more"),
        ("cispo", {"clip_high": -1.0}, "loss.clip_high of cispo must be 0 or more"),
        ("sapo", {"temperature_negative": 0.0}, "temperature_negative of sapo must be over 0"),
        ("dppo", {"limit": -1.0}, "loss.limit of dppo must be 0 or more"),
        ("ppo_clip", {"clip_high": math.inf}, "loss.clip_high of ppo_clip must be 0 or more"),
        ("dppo", {"limit": math.nan}, "loss.limit of dppo must be 0 or more"),
    ],
)
def test_settings_out_of_range_are_refused(name, wrong, says):
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match=says):
        LOSSES[name].function(nothing, nothing, nothing, **wrong)
