"""What each request has of its own: rows of keys and values, side by side with others of about their length.

A row that has filled its shelf moves to one of twice the size. So attention over rows of all lengths is a call per
shelf, nothing is gathered, and less than half of what is read is padding.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnwise.engines.slots.kv_layout import Shapes, States, copy_into, part

SHORTEST = 32
FEWEST = 4


class Shelf:
    """Rows of up to `size` tokens, without gaps between them: `slots[i]` is whose row i is."""

    def __init__(self, shapes: Shapes, size: int) -> None:
        self.shapes = shapes
        self.size = size
        self.num_rows = FEWEST
        self.states = shapes.zero_rows(self.num_rows, size)
        self.slots: list[int] = []

    def add(self, slot: int) -> int:
        """A new last row."""
        if len(self.slots) == self.num_rows:
            self.resize(2 * self.num_rows)
        self.slots.append(slot)
        return len(self.slots) - 1

    def remove(self, row: int) -> int:
        """Take a row away; the last row takes its place, and whose that is is returned."""
        last = self.slots.pop()
        if row < len(self.slots):
            copy_into(self.row(row), self.row(len(self.slots)))
            self.slots[row] = last
        if self.num_rows > FEWEST and len(self.slots) <= self.num_rows // 4:
            self.resize(self.num_rows // 2)
        return last

    def resize(self, num_rows: int) -> None:
        states = self.shapes.zero_rows(num_rows, self.size)
        used = len(self.slots)
        copy_into([own[:, :, :used] for own in states], [own[:, :, :used] for own in self.states])
        self.states, self.num_rows = states, num_rows

    def row(self, row: int) -> States:
        return tuple(own[:, :, row] for own in self.states)


class Shelves:
    """All shelves, by size; a slot has one row at most."""

    def __init__(self, shapes: Shapes, longest: int) -> None:
        self.shapes = shapes
        self.longest = longest
        self.shelves: dict[int, Shelf] = {}
        self.where: dict[int, tuple[int, int]] = {}
        """slot -> (size of its shelf, row)"""

    def size_for(self, num_tokens: int) -> int:
        """The size of the shelf for a row of so many tokens."""
        size = SHORTEST
        while size < num_tokens:
            size *= 2
        return min(size, max(self.longest, num_tokens))

    def size_of(self, slot: int) -> int:
        return self.where[slot][0]

    def put(self, slot: int, num_tokens: int, pieces: Iterable[States] = ()) -> None:
        """Give a slot a row for so many tokens, which begins with copies of the pieces."""
        size = self.size_for(num_tokens)
        shelf = self.shelves.get(size) or self.shelves.setdefault(size, Shelf(self.shapes, size))
        row = shelf.add(slot)
        self.where[slot] = size, row
        place = 0
        for piece in pieces:
            length = piece[0].shape[-2] if piece else 0
            copy_into(part(shelf.row(row), place, place + length), piece)
            place += length

    def move(self, slot: int, num_tokens: int) -> None:
        """Give a slot a longer row."""
        size, row = self.where[slot]
        own = self.shelves[size].row(row)
        self.put(slot, num_tokens, [own])
        self.drop_row(size, row)

    def drop(self, slot: int) -> None:
        """Take a slot's row away."""
        self.drop_row(*self.where.pop(slot))

    def drop_row(self, size: int, row: int) -> None:
        shelf = self.shelves[size]
        moved = shelf.remove(row)
        if self.where.get(moved, (0, 0)) == (size, len(shelf.slots)):
            self.where[moved] = size, row
        if not shelf.slots:
            del self.shelves[size]

    def states(self, slot: int, start: int, end: int) -> States:
        """The keys and values of some of a slot's tokens."""
        size, row = self.where[slot]
        return part(self.shelves[size].row(row), start, end)
