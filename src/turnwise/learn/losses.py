"""Policy losses: per-token terms. The learner sums weight times term; nothing here averages or masks rows.

Letters: K action tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(logprobs [K], old [K], advantages [K], ...) -> (terms [K], per-token measurements by name)."""


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate, with its own bound on either side."""
    ratio = log_ratio(logprobs, old).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain, clipped), {"ratio": ratio.detach(), "clipped": (clipped > plain).to(ratio.dtype)}


def likelihood(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log likelihood, for demonstrations; no behaviour policy enters."""
    return -advantages * logprobs, {}


LOSSES: dict[str, Loss] = {"ppo_clip": ppo_clip}


def log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    return (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
