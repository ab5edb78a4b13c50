"""The numbers that an action token can be coloured by. A new one is one row of CHANNELS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnwise.inspect.recorded_attempt import RecordedAttempt
from turnwise.view.clipped import number

LARGEST_GAP = 50.0
"""So that a ratio is a number that JSON and a page can show."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One number per action token."""

    name: str
    label: str
    meaning: str
    scale: str
    """`diverging` around `centre`, `sequential` from low to high, or `steps` for whole numbers that are names."""
    of: Callable[[RecordedAttempt], Sequence[NDArray[Any]]]
    """One array per turn; nothing where the attempt has no such numbers."""
    centre: float = 0.0


CHANNELS = (
    Channel("credit", "credit", "Advantage that the token was trained with.", "diverging", lambda one: one.credit),
    Channel(
        "logprob",
        "logprob",
        "Log probability under the distribution that the engine sampled from.",
        "sequential",
        lambda one: [turn.logprobs for turn in one.trajectory.turns],
    ),
    Channel(
        "entropy",
        "entropy",
        "Entropy of the distribution that it was drawn from.",
        "sequential",
        lambda one: one.entropies,
    ),
    Channel(
        "gap",
        "gap",
        "The learner's log probability before the step, minus the engine's.",
        "diverging",
        lambda one: gaps_of(one),
    ),
    Channel(
        "ratio",
        "ratio",
        "The learner's probability before the step, divided by the engine's.",
        "diverging",
        lambda one: [np.exp(np.minimum(gap, LARGEST_GAP)) for gap in gaps_of(one)],
        centre=1.0,
    ),
    Channel(
        "weight", "token weight", "Share of the token in the objective.", "sequential", lambda one: one.token_weights
    ),
    Channel(
        "version",
        "version",
        "Version of the weights that sampled the token.",
        "steps",
        lambda one: [turn.versions for turn in one.trajectory.turns],
    ),
)


def gaps_of(attempt: RecordedAttempt) -> list[NDArray[Any]]:
    """Per turn: the learner's logprobs minus the engine's; nothing where the run did not record the learner's."""
    pairs = zip(attempt.learner_logprobs, attempt.trajectory.turns, strict=False)
    return [np.asarray(logprobs, np.float64) - turn.logprobs for logprobs, turn in pairs]


def channels_of(attempt: RecordedAttempt) -> list[dict[str, Any]]:
    """The channels that an attempt has, with the smallest and the largest value."""
    found = []
    for channel in CHANNELS:
        parts = [np.asarray(part, np.float64) for part in channel.of(attempt)]
        values = np.concatenate(parts) if parts else np.zeros(0)
        values = values[np.isfinite(values)]
        if len(values):
            found.append(
                {
                    **{name: getattr(channel, name) for name in ("name", "label", "meaning", "scale", "centre")},
                    "low": number(float(values.min())),
                    "high": number(float(values.max())),
                }
            )
    return found


def values_of(attempt: RecordedAttempt, turn: int, start: int, end: int) -> dict[str, list[float | None]]:
    """By channel: the values of some action tokens of a turn."""
    found = {}
    for channel in CHANNELS:
        arrays = channel.of(attempt)
        if turn < len(arrays):
            found[channel.name] = [number(value) for value in np.asarray(arrays[turn][start:end], np.float64).tolist()]
    return found
