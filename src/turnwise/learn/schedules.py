"""Learning-rate schedules: the factor on the peak rate at each update."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def schedule(name: str, warmup: int, total: int) -> Schedule:
    """The factor as a function of the number of updates already made, of `total`."""

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        done = (update - warmup) / max(1, total - warmup)
        return SHAPES[name](min(1.0, done))

    return factor


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}
