"""Balancing groups over ranks by what their plans cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of an update as measured: per token for everything linear, per pair for attention.

    Example:
        Cost(token=3.1e-4, pair=2.4e-8).of(plan)
    """

    token: float
    pair: float

    def of(self, plan: Plan) -> float:
        """Seconds of one update of a plan; the second forward pass of several stretches included."""
        again = 4.0 / 3.0 if plan.num_stretches > 1 else 1.0
        return again * (self.token * plan.num_tokens + self.pair * plan.num_pairs)

    @classmethod
    def fitted(cls, plans: Sequence[Plan], seconds: Sequence[float]) -> Cost:
        """What explains measured seconds best, neither of the two below nothing."""
        table = np.array([[plan.num_tokens, plan.num_pairs] for plan in plans], np.float64)
        target = np.asarray(seconds, np.float64)
        scale = 1.0 / target  # relative errors count the same for short and long passes
        token, pair = np.linalg.lstsq(table * scale[:, None], target * scale, rcond=None)[0]
        if pair < 0:
            return cls(float(np.mean(target / table[:, 0])), 0.0)
        if token < 0:
            return cls(0.0, float(np.mean(target / table[:, 1])))
        return cls(float(token), float(pair))


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which groups each rank gets, so that the busiest is about as busy as it must be; every group stays whole.

    The most expensive group goes to the rank with the least to do, and so on; then groups move or change places between
    the busiest rank and another as long as that helps.
    """
    if ranks < 1:
        raise ValueError(f"there must be at least one rank (got {ranks})")
    loads = [(0.0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for group in sorted(range(len(costs)), key=lambda group: -costs[group]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(group)
        heapq.heappush(loads, (load + costs[group], rank))
    while improved(shares, costs):
        pass
    return [sorted(share) for share in shares]


def improved(shares: list[list[int]], costs: Sequence[float]) -> bool:
    """Make the busiest rank less busy by one move or exchange, if there is one that helps."""
    loads = [sum(costs[group] for group in share) for share in shares]
    busiest = max(range(len(shares)), key=loads.__getitem__)
    best, found = loads[busiest], None
    for other in range(len(shares)):
        if other == busiest:
            continue
        for mine in shares[busiest]:
            for yours in (None, *shares[other]):
                moved = costs[mine] - (0.0 if yours is None else costs[yours])
                peak = max(loads[busiest] - moved, loads[other] + moved)
                if moved > 0 and peak < best * (1.0 - 1e-9):
                    best, found = peak, (mine, yours, other)
    if found is None:
        return False
    mine, yours, other = found
    shares[busiest].remove(mine)
    shares[other].append(mine)
    if yours is not None:
        shares[other].remove(yours)
        shares[busiest].append(yours)
    return True
