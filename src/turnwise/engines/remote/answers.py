"""Tokens and logprobs that a server gave. They are checked: a server may be broken, and they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.engines.base import EngineFailure, shown
from turnwise.tokens import Floats, Tokens

ROUNDING = 1e-3
"""By how much rounding may raise a logprob above 0."""


def checked_tokens(given: Sequence[Any], *, most: int, vocabulary: int) -> Tokens:
    """Sampled tokens, of which there may be so many; an EngineFailure that begins with a verb where they are none."""
    if len(given) > most:
        raise EngineFailure(f"gave {len(given)} tokens, and {most} were asked for")
    for token in given:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise EngineFailure(f"sampled {shown(token)}, and tokens of the model are 0 to {vocabulary - 1}")
    return np.array(given, np.int32)


def checked_logprobs(given: Sequence[Any], wanted: int) -> Floats:
    """A logprob for each of so many tokens; an EngineFailure that begins with a verb where they are none."""
    numbers = [value for value in given if type(value) in (int, float)]
    logprobs = np.array(numbers, np.float64)
    if len(given) != wanted or len(numbers) != wanted or not np.isfinite(logprobs).all():
        raise EngineFailure(f"gave {wanted} tokens no finite logprob each: the model's logits are no numbers")
    if (logprobs > ROUNDING).any():
        raise EngineFailure(f"gave a logprob of {logprobs.max():g}, and none is above 0")
    return np.minimum(logprobs, 0).astype(np.float32)
