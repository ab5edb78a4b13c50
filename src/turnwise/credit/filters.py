"""The filters that a recipe can name (`filter.name`): which groups are worth training on.

A dropped group is replaced by a new one. To add a filter, write a function of a group and enter it in FILTERS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate

from turnwise.types import Group


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter and what it assumes of the objective.

    Example:
        Filter(has_signal, drops_equal_totals=True)
    """

    function: Callable[Concatenate[Group, ...], bool]
    """(group, *, settings) -> whether the group is trained on."""
    drops_equal_totals: bool = False
    """It drops groups whose attempts all have the same total. That loses nothing only if the estimator gives such
    groups no credit, no KL penalty is still to change the totals, and no other term learns from them."""


def keep_all(group: Group) -> bool:
    """Keep every group."""
    return True


def has_signal(group: Group) -> bool:
    """Keep groups whose attempts differ in their totals; estimators that compare attempts give the others no credit.

    This is DAPO's dynamic sampling (arXiv 2503.14476). It looks at totals of attempts, never at rewards of turns.
    """
    totals = {trajectory.total for trajectory in group.trajectories}
    return len(totals) > 1


FILTERS: dict[str, Filter] = {
    "keep_all": Filter(keep_all),
    "dynamic_sampling": Filter(has_signal, drops_equal_totals=True),
}
