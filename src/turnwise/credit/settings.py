"""Checks of the settings of estimators and losses: a one-line ValueError that names the setting."""

from __future__ import annotations

import math


def check_fraction(setting: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{setting} must be between 0 and 1 (got {value!r})")


def check_not_negative(setting: str, value: float) -> None:
    """Refuse a negative number, infinity and NaN."""
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{setting} must be 0 or more (got {value!r})")
