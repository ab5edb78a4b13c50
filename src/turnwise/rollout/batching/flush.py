"""When a queue is flushed, and into how large calls.

A call of n items is taken to last c0 + c1 * n seconds, and at most `slots` calls are under way. The adaptive rule
flushes when a slot is free and

    queued >= max_batch, or the oldest item has waited max_wait, or queued + in service >= live,

and then takes

    max(1, min(queued, max_batch, clamp(ceil(queued / slots), c0 / c1, 10 * c0 / c1)))

items. Below c0 / c1 of them the price of the call is most of what it costs; above ten times that it is a tenth at most,
and the other slots had better share. `live` counts those who may still submit something, so that the last ones go at
once, and nobody waits for somebody who will never come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from turnwise.rollout.batching.costs import CallCosts

REASONS = ("full", "everyone", "waited")


@dataclass(frozen=True, slots=True)
class View:
    """What a rule decides on."""

    queued: int
    in_service: int
    """Items in calls that are under way and that somebody still waits for."""
    live: int
    overdue: bool
    """Whether an item has waited as long as its lane allows."""
    slots: int
    free: int
    """Slots without a call."""
    costs: CallCosts | None
    learning: bool
    """Whether a call of several items is under way."""


class Rule(Protocol):
    """When a queue is flushed and into how large calls."""

    def reason(self, view: View) -> str:
        """Why to flush now; empty for not yet."""
        ...

    def sizes(self, view: View) -> list[int]:
        """Sizes of the calls of one flush."""
        ...


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The rule at the head of this file; with max_batch = 1 everybody calls alone.

    While the prices are not known, one call at a time takes its slot's share of the queue, to learn them, and the
    others take one item each. Were all of them to take what is there, a service that works through its items one by one
    would keep everybody waiting before it was known to be one.
    """

    max_batch: int = 256

    def reason(self, view: View) -> str:
        if view.queued >= self.max_batch:
            return "full"
        if view.queued + view.in_service >= view.live:
            return "everyone"
        return "waited" if view.overdue else ""

    def sizes(self, view: View) -> list[int]:
        share = math.ceil(view.queued / view.slots)
        if view.costs is None:
            size = 1 if view.learning else share
        else:
            worth = view.costs.per_call / view.costs.per_item
            size = max(math.ceil(worth), min(math.ceil(10 * worth), share))
        return [max(1, min(view.queued, self.max_batch, size))]


@dataclass(frozen=True, slots=True)
class Lockstep:
    """Wait for everyone, then serve them all, in even parts over the slots: what loops with a barrier do."""

    def reason(self, view: View) -> str:
        return "everyone" if not view.in_service and view.queued >= view.live else ""

    def sizes(self, view: View) -> list[int]:
        parts = min(view.free, view.queued)
        return [view.queued // parts + (part < view.queued % parts) for part in range(parts)]
