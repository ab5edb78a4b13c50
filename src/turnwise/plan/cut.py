"""Cutting a prefix tree to a budget of unique tokens per pass, with as little computed twice as can be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from turnwise.plan.blocks import Index
from turnwise.plan.plan import Plan
from turnwise.plan.routes import settle_routes
from turnwise.plan.tree import grow, heavy_first, sort_rows
from turnwise.types import Turn

AGAIN, IN_STRETCHES = 3, 1
"""Forward passes a token costs more, if it is laid out once more, and if its plan takes several stretches: a backward
pass costs two of them, and stretches run theirs twice."""


def cut(turns: Sequence[Turn], tokens_per_pass: int) -> list[Plan]:
    """Plans that hold every turn with an action exactly once, in passes of at most `tokens_per_pass` unique tokens.

    A plan takes several passes only where one of its turns is longer by itself.
    """
    rows, sequences = sort_rows(turns, [place for place, turn in enumerate(turns) if len(turn.action)])
    lengths = np.array([len(sequences[row.turn]) for row in rows], np.int64)
    shared = np.array([row.shared for row in rows], np.int64)
    routes = settle_routes(turns)
    return [
        grow(turns, heavy_first(rows[low:high], sequences), sequences, tokens_per_pass, routes)
        for low, high in parts(lengths, shared, tokens_per_pass)
    ]


def parts(lengths: Index, shared: Index, budget: int) -> list[tuple[int, int]]:
    """Sorted rows cut into consecutive parts: of all cuts one that costs least, and of those one with the fewest parts
    within the budget.

    A part is within the budget, or has a row that is over it by itself. Such a part has at most a budget more tokens
    than the longest row, because the keys and values of all of them are kept. A part has the tokens of its first row
    and what every other row adds to the row before it; so a cut before row k costs the tokens that row k shares with
    the one before. By dynamic programming over the ends of parts, the best beginning found in windows that only move
    forward.
    """
    added = [0, *np.cumsum(lengths - shared).tolist()]
    sizes, costs = lengths.tolist(), shared.tolist()
    limit = max(sizes, default=0) + budget
    begins, best = [0], (0, 0)
    prices: list[tuple[int, int]] = []
    """Of all rows before a part that begins at each row: (cost of them and of the cut, parts within the budget)."""
    short, long = Window(), Window()
    num_long = 0
    """How many beginnings have a long row after them."""
    for end in range(1, len(sizes) + 1):
        last = end - 1
        prices.append((best[0] + AGAIN * costs[last], best[1]))
        short.push(*prices[last], last, sizes[last] - added[end])
        if sizes[last] > budget:
            for begin in range(num_long, end):
                (cost, count), base = prices[begin], sizes[begin] - added[begin + 1]
                long.push(cost + IN_STRETCHES * base, count, begin, base)
            num_long = end
        short.drop(budget - added[end])
        long.drop(limit - added[end])
        options = [((cost, count + 1), begin) for cost, count, begin in short.best()]
        options += [((cost + IN_STRETCHES * added[end], count), begin) for cost, count, begin in long.best()]
        best, begin = min(options)
        begins.append(begin)
    return followed(begins)


class Window:
    """Beginnings of parts with the same end, the best of them first: `base` is the size of a part less all
    tokens that were added up to its end."""

    def __init__(self) -> None:
        self.entries: deque[tuple[int, int, int, int]] = deque()

    def push(self, cost: int, count: int, begin: int, base: int) -> None:
        """Take in a later beginning; earlier ones that are no better can never be chosen again."""
        while self.entries and self.entries[-1][:2] >= (cost, count):
            self.entries.pop()
        self.entries.append((cost, count, begin, base))

    def drop(self, most: int) -> None:
        """Leave out beginnings whose parts have become too large."""
        while self.entries and self.entries[0][3] > most:
            self.entries.popleft()

    def best(self) -> list[tuple[int, int, int]]:
        """[(cost, count, begin)], or nothing."""
        return [self.entries[0][:3]] if self.entries else []


def followed(begins: Sequence[int]) -> list[tuple[int, int]]:
    """The parts from the first row to the last, given where the best part that ends at each row begins."""
    found, end = [], len(begins) - 1
    while end:
        found.append((begins[end], end))
        end = begins[end]
    return found[::-1]
