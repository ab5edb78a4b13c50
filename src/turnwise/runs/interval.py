"""Confidence intervals of shares and of means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t with 1, 2, ... 15 degrees of freedom."""


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95 % t-interval of a mean, such as that of several seeds; NaN for a single
    value.

    Example:
        half_width([0.91, 0.95, 0.93]) is about 0.05
    """
    if len(values) < 2:
        return math.nan
    quantile = STUDENT[len(values) - 2] if len(values) - 2 < len(STUDENT) else 1.96 + 2.5 / (len(values) - 1)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def wilson(successes: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a success rate; (0, 1) when nothing was tried.

    Unlike the mean plus or minus z standard errors it stays within [0, 1] and keeps a width at 0 and n successes.

    Example:
        wilson(8, 10) is about (0.49, 0.94)
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n, got {successes} of {n}")
    if n == 0:
        return 0.0, 1.0
    share, spread = successes / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == n else min(1.0, middle + half)
    return low, high


def clustered(tallies: Sequence[tuple[int, int]], z: float = 1.96) -> tuple[float, float]:
    """The interval of a success rate over (successes, attempts) of tasks that may each be attempted several times.

    Attempts at one task are alike, so that they tell less than as many tasks would: it is Wilson's interval for the
    number of independent attempts that would leave the rate as uncertain as the spread between tasks says it is, at
    least the number of tasks and at most that of attempts.

    Example:
        clustered([(8, 8), (0, 8)]) is as wide as wilson(1, 2)
    """
    rate, independent = rate_of(tallies), independent_attempts(tallies)
    return wilson(rate * independent, independent, z)


def rate_of(tallies: Sequence[tuple[int, int]]) -> float:
    """The success rate over all attempts; 0 where there are none."""
    total = sum(attempts for _, attempts in tallies)
    return sum(successes for successes, _ in tallies) / total if total else 0.0


def independent_attempts(tallies: Sequence[tuple[int, int]]) -> float:
    """How many independent attempts would leave the rate as uncertain as the spread between tasks says it is."""
    tried = [(successes, attempts) for successes, attempts in tallies if attempts]
    tasks, total, rate = len(tried), sum(attempts for _, attempts in tried), rate_of(tried)
    if tasks < 2 or total == tasks or rate in (0.0, 1.0):
        return float(tasks)
    surprise = math.fsum((successes - rate * attempts) ** 2 for successes, attempts in tried)
    variance = surprise / total**2 * tasks / (tasks - 1)
    return min(float(total), max(float(tasks), rate * (1 - rate) / variance)) if variance else float(total)


Estimate = tuple[float, float, float]
"""A rate and the two ends of its interval."""


def difference_interval(first: Estimate, second: Estimate, correlation: float = 0.0) -> tuple[float, float]:
    """The interval of the second rate minus the first, by Newcombe's square-and-add method.

    It needs no more than the interval of each rate, and keeps a width where a rate is 0 or 1, unlike the difference
    plus or minus z standard errors. With `correlation`, that of the results at the same tasks, it is the method for
    pairs (Newcombe, Statistics in Medicine 17, 1998, pages 873 and 2635).

    Example:
        difference_interval((0.6, 0.47, 0.72), (0.8, 0.69, 0.88)) is about (0.04, 0.35)
    """
    (one, one_low, one_high), (two, two_low, two_high) = first, second

    def reach(near: float, far: float) -> float:
        return math.sqrt(max(0.0, near * near - 2.0 * correlation * near * far + far * far))

    change = two - one
    low = change - reach(two - two_low, one_high - one)
    high = change + reach(two_high - two, one - one_low)
    return max(-1.0, low), min(1.0, high)
