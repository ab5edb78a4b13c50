"""The policy losses that a recipe can name (`loss.name`): one term per action token.

The learner sums token weight times term; nothing here averages or masks rows. To add a loss, write a function
(logprobs, old, advantages, *, settings) -> (terms, measurements) and enter it in LOSSES.

Symbols: K action tokens; A the advantage of a token; r = exp(logprob - anchor) its ratio, where the anchor is the old
logprob. Losses whose ratio is one of a whole sequence get an anchor that makes it so (credit/scope.py) and need no code
for it. Every loss scales with A, so an off-policy correction can be a factor on A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, Literal

import torch
from torch import Tensor

from turnwise.credit.scope import LOG_RATIO_LIMIT
from turnwise.credit.settings import check_not_negative

LossTerms = tuple[Tensor, dict[str, Tensor]]
"""(terms [K], per-token measurements by name)."""
LossFunction = Callable[Concatenate[Tensor, Tensor, Tensor, ...], LossTerms]
"""(logprobs [K], old [K], advantages [K], *, settings) -> terms and measurements."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A policy loss and what its ratio is.

    Example:
        Loss(gspo, of_sequences=True)
    """

    function: LossFunction
    """Computes the terms. Its keyword arguments are the settings that a recipe may give in [loss]."""
    of_sequences: bool = False
    """Its ratio is one of a whole turn or trajectory, so a recipe must say which by `loss.scope`."""
    has_ratio: bool = True
    """It compares the policy with an anchor. If not, `loss.anchor` would be ignored and is refused."""


def ppo_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> LossTerms:
    """PPO's clipped surrogate, with a bound for each side; `dual_clip` over 1 bounds the term of negative advantages.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with dual_clip c and A < 0: min(L, -A c).
    PPO: arXiv 1707.06347. clip_high over clip_low is DAPO's clip-higher, arXiv 2503.14476. dual_clip: arXiv 1912.09729.
    Assumes that the anchor is close to the policy that sampled: a clipped token has no gradient.
    """
    check_clip("ppo_clip", clip_low, clip_high)
    if dual_clip and dual_clip <= 1.0:
        raise ValueError(f"loss.dual_clip must be over 1, or 0 for none (got {dual_clip:g})")
    ratio = log_ratio(logprobs, old).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = torch.maximum(plain, bounded)
    if dual_clip:
        terms = torch.where(advantages < 0, torch.minimum(terms, -advantages * dual_clip), terms)
    return terms, measure(ratio, terms != plain)


def gspo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossTerms:
    """The clipped surrogate with the ratio of a whole turn or trajectory: the geometric mean of its tokens' ratios.

    L = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean over the sequence of logprob - old).
    arXiv 2507.18071, in the form of GSPO-token: the anchor makes each token's ratio equal s, and the gradient goes
    through the token's own logprob. The bounds are much tighter than PPO's because s varies much less than r.
    """
    check_clip("gspo", clip_low, clip_high)
    return ppo_clip(logprobs, old, advantages, clip_low=clip_low, clip_high=clip_high)


def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor) -> LossTerms:
    """The plain policy gradient, without a ratio.

    L = -A logprob (Williams 1992). Assumes that the policy that is trained has sampled the tokens: after the first
    update of a step, or under lag, the gradient is biased.
    """
    return -advantages * logprobs, measure(log_ratio(logprobs, old).exp())


def cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> LossTerms:
    """The policy gradient weighted by the clipped ratio as a constant, so that no token loses its gradient.

    L = -A stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) logprob.
    MiniMax-M1, arXiv 2506.13585. Clipping biases the importance weight and, unlike PPO's, never masks a token.
    """
    check_clip("cispo", clip_low, clip_high)
    ratio = log_ratio(logprobs, old).exp().detach()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -advantages * bounded * logprobs, measure(ratio, bounded != ratio)


def sapo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> LossTerms:
    """A soft gate in place of the clip: a sigmoid of the ratio with slope 1 at r = 1.

    L = -A (4 / t) sigmoid(t (r - 1)), t = temperature_positive where A > 0 and temperature_negative elsewhere.
    arXiv 2511.20347, which sets the negative temperature higher: gradients of negative advantages then fade faster as r
    leaves 1.
    """
    if min(temperature_positive, temperature_negative) <= 0.0:
        raise ValueError("loss.temperature_positive and temperature_negative of sapo must be over 0")
    ratio = log_ratio(logprobs, old).exp()
    sharpness = torch.where(advantages > 0, temperature_positive, temperature_negative).to(ratio.dtype)
    gate = torch.sigmoid(sharpness * (ratio - 1.0)) * (4.0 / sharpness)
    return -advantages * gate, measure(ratio)


def dppo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    limit: float = 0.2,
) -> LossTerms:
    """The surrogate without the tokens whose probability has moved by more than `limit` and would move further.

    L = -A r, or 0 where D > limit and A (r - 1) > 0. With p the old and q the present probability of the sampled token,
    D is |p - q| ("tv") or p log(p / q) + (1 - p) log((1 - p) / (1 - q)) ("kl").
    arXiv 2602.04879, with its binary approximation: D compares the sampled token with all others taken together, and so
    is at most the divergence of the whole distributions.
    """
    check_not_negative("loss.limit of dppo", limit)
    ratio = log_ratio(logprobs, old).exp()
    with torch.no_grad():
        p, q = old.exp(), logprobs.exp()
        if divergence == "tv":
            moved = (p - q).abs()
        else:
            tiny = torch.finfo(p.dtype).tiny
            rest_p, rest_q = (1.0 - p).clamp_min(tiny), (1.0 - q).clamp_min(tiny)
            moved = p * (old - logprobs) + rest_p * (rest_p.log() - rest_q.log())
        masked = (moved > limit) & (advantages * (ratio - 1.0) > 0)
    return torch.where(masked, 0.0, -advantages * ratio), measure(ratio, masked)


def likelihood(logprobs: Tensor, old: Tensor, advantages: Tensor) -> LossTerms:
    """Negative log likelihood, for demonstrations: L = -A logprob with A = 1. It ignores the old logprobs."""
    return -advantages * logprobs, {}


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(ppo_clip),
    "gspo": Loss(gspo, of_sequences=True),
    "reinforce": Loss(reinforce, has_ratio=False),
    "cispo": Loss(cispo),
    "sapo": Loss(sapo),
    "dppo": Loss(dppo),
}


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    return (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def measure(ratio: Tensor, clipped: Tensor | None = None) -> dict[str, Tensor]:
    """What every loss with a ratio reports: the ratio, and where the loss clipped or masked it."""
    ratio = ratio.detach()
    return {"ratio": ratio} if clipped is None else {"ratio": ratio, "clipped": clipped.to(ratio.dtype)}


def check_clip(name: str, clip_low: float, clip_high: float) -> None:
    check_not_negative(f"loss.clip_low of {name}", clip_low)
    check_not_negative(f"loss.clip_high of {name}", clip_high)
