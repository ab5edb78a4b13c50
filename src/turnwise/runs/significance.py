"""Tests of whether two success rates differ: of the same tasks, and of different ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

EXACT_RANGE = 1 << 12
"""Largest sum of whole differences that is enumerated; above it the normal approximation is as good."""


def paired_p_value(differences: Sequence[Fraction]) -> float:
    """The two-sided p-value of the sign-flip test: how often differences per task would sum to something as far from 0
    if the sign of each were a fair coin.

    With one attempt per task, where a difference is -1, 0 or 1, this is McNemar's exact test. It is exact, by
    enumeration of all sums, where the differences have a small common denominator, and normal otherwise.

    Example:
        paired_p_value([Fraction(1)] * 5) == 2 / 2**5
    """
    moved = [abs(difference) for difference in differences if difference]
    if not moved:
        return 1.0
    observed = abs(sum(differences, Fraction(0)))
    scale = math.lcm(*(difference.denominator for difference in moved))
    sizes = [int(difference * scale) for difference in moved]
    if sum(sizes) > EXACT_RANGE:
        return normal_tail(float(observed) / math.sqrt(math.fsum(float(size) ** 2 for size in moved)))
    return float(min(1.0, flipped(sizes, int(observed * scale))))


def flipped(sizes: Sequence[int], observed: int) -> float:
    """The chance that the sum of `sizes` with random signs is `observed` or more, or its negative or less."""
    total = sum(sizes)
    chances = np.zeros(2 * total + 1)  # of each sum, from -total on
    chances[total] = 1.0
    for size in sizes:
        halves = np.zeros_like(chances)
        halves[size:] += 0.5 * chances[:-size]
        halves[:-size] += 0.5 * chances[size:]
        chances = halves
    if observed == 0:
        return 1.0
    return 2.0 * float(chances[total + observed :].sum())


def unpaired_p_value(first: float, first_count: float, second: float, second_count: float) -> float:
    """The two-sided p-value of the two-proportion z-test with a pooled rate.

    Example:
        unpaired_p_value(0.5, 100, 0.65, 100) is about 0.032
    """
    if not first_count or not second_count:
        return 1.0
    pooled = (first * first_count + second * second_count) / (first_count + second_count)
    spread = math.sqrt(pooled * (1.0 - pooled) * (1.0 / first_count + 1.0 / second_count))
    return normal_tail((second - first) / spread) if spread else 1.0


def normal_tail(z: float) -> float:
    """How often a standard normal number is as far from 0 as z."""
    return math.erfc(abs(z) / math.sqrt(2.0))
