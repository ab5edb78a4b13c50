"""Filters: which groups are worth training on. A dropped group is replaced by a new one."""

from __future__ import annotations

from collections.abc import Callable

from turnwise.types import Group

Filter = Callable[[Group], bool]


def keep_all(group: Group) -> bool:
    """Every group."""
    return True


def zero_variance(group: Group) -> bool:
    """Groups whose attempts differ in their totals: the others carry no signal for estimators that compare within."""
    totals = {trajectory.total for trajectory in group.trajectories}
    return len(totals) > 1


FILTERS: dict[str, Filter] = {"keep_all": keep_all, "zero_variance": zero_variance}
WITHIN_GROUPS = frozenset({"grpo", "rloo", "maxrl"})
"""Estimators that give a group of equal totals no credit at all, so that dropping it loses nothing."""
