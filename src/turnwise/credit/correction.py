"""Off-policy correction: the engine sampled, the learner trains, and the two do not agree to the last bit.

The ratio is that of the learner's logprobs before the first update to the engine's, as sampled. It becomes a factor on
a token's credit, beside the loss's own ratio of new to old; a masked token has the factor 0 and nothing is normalised
again. In this order: mask tokens outside of a band, truncate ratios, mask sequences outside of a band. A masked token
leaves its sequence's ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from turnwise.credit.returns import Array, Credit, joined
from turnwise.credit.scope import LOG_RATIO_LIMIT, PerTurn, Scope, Sequences
from turnwise.types import Group, turns_of

Band = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Correction:
    """How credit is corrected for the gap between engine and learner.

    Example:
        Correction(truncate="token", cap=2.0)(groups, credit, old)
    """

    truncate: Literal["off", "token", "sequence"] = "off"
    """What is importance-weighted: nothing, each token by its own ratio, or all tokens of a sequence by the product."""
    cap: float = 2.0
    """Ratios count at most this."""
    token_band: Band | None = None
    """Tokens with a ratio outside do not train."""
    sequence_band: Band | None = None
    """Sequences whose geometric mean ratio is outside do not train."""
    scope: Scope = "trajectory"
    """What a sequence is."""

    def __call__(self, groups: Sequence[Group], credit: PerTurn, old: PerTurn) -> tuple[Credit, dict[str, float]]:
        """(corrected credit, measurements): factors of the policy's terms only, not of entropy and divergence."""
        sequences = Sequences(groups, self.scope)
        sampled = joined([turn.logprobs for turn in turns_of(groups)])
        if np.isnan(sampled).any():
            raise ValueError("a correction compares with the engine's logprobs, and some are NaN; remove it")
        factors, measured = self.factors(sequences, clamped(joined(old) - sampled))
        return sequences.by_turn(joined(credit) * factors), measured

    def factors(self, sequences: Sequences, log_ratio: Array) -> tuple[Array, dict[str, float]]:
        """([N] factor of every token, measurements)."""
        counted = inside(log_ratio, self.token_band)
        factors = counted
        if self.truncate == "token":
            factors = factors * np.minimum(np.exp(log_ratio), self.cap)
        elif self.truncate == "sequence":
            product = np.exp(clamped(sequences.sum(log_ratio * counted)))
            factors = factors * np.minimum(product, self.cap)
        whole = inside(sequences.mean(log_ratio, counted), self.sequence_band)
        factors = factors * whole
        empty = len(log_ratio) == 0
        return factors, {
            "correction/mean": 1.0 if empty else float(factors.mean()),
            "correction/masked_tokens": 0.0 if empty else float(1.0 - counted.mean()),
            "correction/masked_by_sequence": 0.0 if empty else float(1.0 - whole.mean()),
            "correction/capped": 0.0 if empty else self.share_capped(sequences, log_ratio, counted),
        }

    def share_capped(self, sequences: Sequences, log_ratio: Array, counted: Array) -> float:
        if self.truncate == "off":
            return 0.0
        of_what = log_ratio if self.truncate == "token" else sequences.sum(log_ratio * counted)
        return float(np.mean((of_what > np.log(self.cap)) & (counted > 0)))


def clamped(log_ratio: Array) -> Array:
    return np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def inside(log_ratio: Array, band: Band | None) -> Array:
    """1 where the ratio is within the band, bounds included, 0 elsewhere."""
    if band is None:
        return np.ones_like(log_ratio)
    low, high = band
    ratio = np.exp(log_ratio)
    return ((low <= ratio) & (ratio <= high)).astype(np.float64)
