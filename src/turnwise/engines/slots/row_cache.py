"""The keys and values of each running request after the prefix that it shares: one row per slot, in buckets by length.

A row that has filled its bucket moves to one of twice the size. So attention over rows of all lengths is one call per
bucket, nothing is gathered, and less than half of what is read is padding.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnwise.engines.slots.kv_layout import KVLayout, KVStates, copy_into, token_range

MIN_SIZE = 32
"""Tokens of a row in the smallest bucket."""
MIN_ROWS = 4
"""Rows that a bucket has memory for at least."""


class RowBucket:
    """Rows of up to `size` tokens without gaps between them: row i belongs to `slots[i]`."""

    def __init__(self, layout: KVLayout, size: int) -> None:
        self.layout = layout
        self.size = size
        self.num_rows = MIN_ROWS
        self.states = layout.zero_rows(self.num_rows, size)
        self.slots: list[int] = []

    def allocate(self, slot: int) -> int:
        """The index of a new last row."""
        if len(self.slots) == self.num_rows:
            self.resize(2 * self.num_rows)
        self.slots.append(slot)
        return len(self.slots) - 1

    def release(self, row: int) -> int:
        """Remove a row. The last row moves to its index; the slot of that last row is returned."""
        last = self.slots.pop()
        if row < len(self.slots):
            copy_into(self.row(row), self.row(len(self.slots)))
            self.slots[row] = last
        if self.num_rows > MIN_ROWS and len(self.slots) <= self.num_rows // 4:
            self.resize(self.num_rows // 2)
        return last

    def resize(self, num_rows: int) -> None:
        states = self.layout.zero_rows(num_rows, self.size)
        used = len(self.slots)
        copy_into([new[:, :, :used] for new in states], [old[:, :, :used] for old in self.states])
        self.states, self.num_rows = states, num_rows

    def row(self, row: int) -> KVStates:
        return tuple(tensor[:, :, row] for tensor in self.states)


class RowCache:
    """All buckets by size; a slot has one row at most."""

    def __init__(self, layout: KVLayout, longest: int) -> None:
        self.layout = layout
        self.longest = longest
        self.buckets: dict[int, RowBucket] = {}
        self.location: dict[int, tuple[int, int]] = {}
        """slot -> (size of its bucket, row)"""

    def bucket_size(self, num_tokens: int) -> int:
        """The size of the bucket for a row of so many tokens."""
        size = MIN_SIZE
        while size < num_tokens:
            size *= 2
        return min(size, max(self.longest, num_tokens))

    def row_size(self, slot: int) -> int:
        return self.location[slot][0]

    def allocate(self, slot: int, num_tokens: int, pieces: Iterable[KVStates] = ()) -> None:
        """Give a slot a row for so many tokens, which begins with copies of the pieces."""
        size = self.bucket_size(num_tokens)
        bucket = self.buckets.get(size) or self.buckets.setdefault(size, RowBucket(self.layout, size))
        row = bucket.allocate(slot)
        self.location[slot] = size, row
        start = 0
        for piece in pieces:
            length = piece[0].shape[-2] if piece else 0
            copy_into(token_range(bucket.row(row), start, start + length), piece)
            start += length

    def grow(self, slot: int, num_tokens: int) -> None:
        """Move a slot's row to a bucket for so many tokens."""
        size, row = self.location[slot]
        self.allocate(slot, num_tokens, [self.buckets[size].row(row)])
        self.release_row(size, row)

    def release(self, slot: int) -> None:
        """Take a slot's row away."""
        self.release_row(*self.location.pop(slot))

    def release_row(self, size: int, row: int) -> None:
        bucket = self.buckets[size]
        moved = bucket.release(row)
        if self.location.get(moved, (0, 0)) == (size, len(bucket.slots)):
            self.location[moved] = size, row
        if not bucket.slots:
            del self.buckets[size]

    def states(self, slot: int, start: int, end: int) -> KVStates:
        """The keys and values of some of the tokens of a slot's row."""
        size, row = self.location[slot]
        return token_range(self.buckets[size].row(row), start, end)
