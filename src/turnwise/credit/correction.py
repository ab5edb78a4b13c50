"""Off-policy correction: the engine sampled the tokens, the learner trains on them, and their logprobs differ.

With r = exp(old - sampled), where old are the learner's logprobs before the first update and sampled are the engine's,
each token's credit is multiplied by a factor. The loss has its own ratio, of the new logprobs to the old. The factor of
a masked token is 0, and nothing is normalised again. In this order:

    token_band            mask tokens with r outside a band               IcePop, arXiv 2510.18855
    importance_sampling   multiply by min(r, cap), or by min(product of r over the sequence, cap)
    sequence_band         mask sequences whose geometric mean of r is outside a band

Truncation at a cap is the clipped importance weight of IMPALA, arXiv 1802.01561. For the gap between a sampling engine
and a learner it is known as truncated importance sampling (TIS). A masked token leaves its sequence's ratio. Log ratios
are clamped at LOG_RATIO_LIMIT. All of this assumes that the engine's logprobs are those of the distribution it sampled
from; a truncated or masked ratio is biased, in exchange for a bounded variance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from turnwise.credit.returns import Array, Credit, concatenate
from turnwise.credit.scope import LOG_RATIO_LIMIT, PerTurn, Scope, Sequences
from turnwise.types import Group, turns_of

Band = tuple[float, float]
Correct = Callable[[Sequence[Group], Credit, PerTurn], tuple[Credit, dict[str, float]]]
"""(groups, credit, old logprobs) -> (credit for the loss, measurements)."""


def uncorrected(groups: Sequence[Group], credit: Credit, old: PerTurn) -> tuple[Credit, dict[str, float]]:
    """Credit as it was estimated."""
    return credit, {}


@dataclass(frozen=True, slots=True)
class Correction:
    """How credit is corrected for the gap between engine and learner.

    Example:
        Correction(importance_sampling="token", importance_ratio_cap=2.0)(groups, credit, old)
    """

    importance_sampling: Literal["off", "token", "sequence"] = "off"
    """What is importance-weighted: nothing, each token by its own ratio, or all tokens of a sequence by the product."""
    importance_ratio_cap: float = 2.0
    """Larger ratios count as this one."""
    token_band: Band | None = None
    """Tokens with a ratio outside do not train."""
    sequence_band: Band | None = None
    """Sequences whose geometric mean ratio is outside do not train."""
    scope: Scope = "trajectory"
    """What a sequence is."""

    def __call__(self, groups: Sequence[Group], credit: PerTurn, old: PerTurn) -> tuple[Credit, dict[str, float]]:
        """(corrected credit, measurements). Only the policy's term is corrected, not entropy and divergence."""
        sequences = Sequences(groups, self.scope)
        sampled = concatenate([turn.logprobs for turn in turns_of(groups)])
        if np.isnan(sampled).any():
            raise ValueError("a correction compares with the engine's logprobs, and some are NaN; remove it")
        factors, measured = self.factors(sequences, clamp(concatenate(old) - sampled))
        return sequences.by_turn(concatenate(credit) * factors), measured

    def factors(self, sequences: Sequences, log_ratio: Array) -> tuple[Array, dict[str, float]]:
        """([N] factor of every token, measurements)."""
        unmasked = inside(log_ratio, self.token_band)
        factors = unmasked
        if self.importance_sampling == "token":
            factors = factors * np.minimum(np.exp(log_ratio), self.importance_ratio_cap)
        elif self.importance_sampling == "sequence":
            product = np.exp(clamp(sequences.sum(log_ratio * unmasked)))
            factors = factors * np.minimum(product, self.importance_ratio_cap)
        sequence_unmasked = inside(sequences.mean(log_ratio, unmasked), self.sequence_band)
        factors = factors * sequence_unmasked
        empty = len(log_ratio) == 0
        return factors, {
            "correction/mean": 1.0 if empty else float(factors.mean()),
            "correction/masked_tokens": 0.0 if empty else float(1.0 - unmasked.mean()),
            "correction/masked_by_sequence": 0.0 if empty else float(1.0 - sequence_unmasked.mean()),
            "correction/capped": 0.0 if empty else self.share_capped(sequences, log_ratio, unmasked),
        }

    def share_capped(self, sequences: Sequences, log_ratio: Array, unmasked: Array) -> float:
        """The share of tokens whose ratio, or whose sequence's product, is above the cap."""
        if self.importance_sampling == "off":
            return 0.0
        truncated = log_ratio if self.importance_sampling == "token" else sequences.sum(log_ratio * unmasked)
        return float(np.mean((truncated > np.log(self.importance_ratio_cap)) & (unmasked > 0)))


def clamp(log_ratio: Array) -> Array:
    return np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def inside(log_ratio: Array, band: Band | None) -> Array:
    """1 where the ratio is within the band, bounds included, 0 elsewhere."""
    if band is None:
        return np.ones_like(log_ratio)
    low, high = band
    ratio = np.exp(log_ratio)
    return ((low <= ratio) & (ratio <= high)).astype(np.float64)
