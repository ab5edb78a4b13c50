"""Policy losses: per-token terms. The learner sums weight times term; nothing here averages or masks rows.

A ratio is that of the policy to its anchor, the old logprobs. Losses whose ratio is that of a whole sequence get an
anchor that says so (credit/scope.py) and are none the wiser. All but `likelihood` scale with the advantage, so that an
off-policy correction is a factor on it. Letters: K action tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from turnwise.credit.scope import LOG_RATIO_LIMIT
from turnwise.credit.settings import check_not_negative

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(logprobs [K], old [K], advantages [K], ...) -> (terms [K], per-token measurements by name)."""


def ppo_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate, with its own bound on either side; `dual_clip`, where it is over 1, bounds the ratio of
    tokens with a negative advantage from above."""
    check_clip("ppo_clip", clip_low, clip_high)
    if dual_clip and dual_clip <= 1.0:
        raise ValueError(f"loss.dual_clip must be over 1, or 0 for none (got {dual_clip:g})")
    ratio = log_ratio(logprobs, old).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = torch.maximum(plain, bounded)
    if dual_clip:
        terms = torch.where(advantages < 0, torch.minimum(terms, -advantages * dual_clip), terms)
    return terms, measured(ratio, terms != plain)


def gspo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of sequence ratios: the anchor makes each token's ratio that of its turn or trajectory,
    while the gradient goes through the token's own logprob."""
    check_clip("gspo", clip_low, clip_high)
    return ppo_clip(logprobs, old, advantages, clip_low=clip_low, clip_high=clip_high)


def reinforce(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient; no ratio, so that every update counts its tokens as its own."""
    return -advantages * logprobs, measured(log_ratio(logprobs, old).exp())


def cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient weighted by the clipped ratio as a constant, so that no token loses its gradient."""
    check_clip("cispo", clip_low, clip_high)
    ratio = log_ratio(logprobs, old).exp().detach()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -advantages * bounded * logprobs, measured(ratio, bounded != ratio)


def sapo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A soft gate in place of the clip: a sigmoid of the ratio with slope 1 at 1, sharper for negative advantages."""
    if min(temperature_positive, temperature_negative) <= 0.0:
        raise ValueError("loss.temperature_positive and temperature_negative of sapo must be over 0")
    ratio = log_ratio(logprobs, old).exp()
    sharpness = torch.where(advantages > 0, temperature_positive, temperature_negative).to(ratio.dtype)
    gate = torch.sigmoid(sharpness * (ratio - 1.0)) * (4.0 / sharpness)
    return -advantages * gate, measured(ratio)


def dppo(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    limit: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate without tokens that have moved too far already and would move on: by the total variation or the KL
    divergence between the two chances of this token against all others."""
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
    return torch.where(masked, 0.0, -advantages * ratio), measured(ratio, masked)


def likelihood(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log likelihood, for demonstrations; no behaviour policy enters."""
    return -advantages * logprobs, {}


LOSSES: dict[str, Loss] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "reinforce": reinforce,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
}
OF_SEQUENCES = frozenset({"gspo"})
"""Losses whose ratio is that of a turn or a trajectory, by `loss.scope`."""


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    return (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def measured(ratio: Tensor, clipped: Tensor | None = None) -> dict[str, Tensor]:
    """What every loss with a ratio reports: it, and where the loss took it back."""
    ratio = ratio.detach()
    return {"ratio": ratio} if clipped is None else {"ratio": ratio, "clipped": clipped.to(ratio.dtype)}


def check_clip(name: str, clip_low: float, clip_high: float) -> None:
    check_not_negative(f"loss.clip_low of {name}", clip_low)
    check_not_negative(f"loss.clip_high of {name}", clip_high)
