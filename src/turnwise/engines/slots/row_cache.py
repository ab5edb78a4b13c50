"""The keys and values of each running request after the prefix that it shares: one row per slot, in buckets by length.

A row that has filled its bucket moves to one of twice the size. So attention over rows of all lengths is one call per
bucket, nothing is gathered, and less than half of what is read is padding. What is done per turn must not grow with
what a row holds: rows move only to close gaps before a pass, and memory of emptied buckets is used again.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from turnwise.engines.slots.kv_layout import KVLayout, KVStates, copy_into, token_range

MIN_SIZE = 32
"""Tokens of a row in the smallest bucket."""
MIN_ROWS = 4
"""Rows that a bucket has memory for at least."""
MOST_SPARE = 256 << 20
"""Bytes of memory without rows that are kept for rows to come."""
NOBODY = -1
"""In place of a slot, where a row was released."""


class RowBucket:
    """Rows of up to `size` tokens: row i belongs to `slots[i]`. Released rows leave gaps until `close_gaps`."""

    def __init__(self, layout: KVLayout, size: int, num_rows: int = MIN_ROWS) -> None:
        self.layout = layout
        self.size = size
        self.num_rows = num_rows
        self.states = layout.zero_rows(self.num_rows, size)
        self.slots: list[int] = []
        self.gaps: list[int] = []

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.states)

    @property
    def is_empty(self) -> bool:
        return len(self.gaps) == len(self.slots)

    def allocate(self, slot: int) -> int:
        """The index of a new row."""
        if self.gaps:
            row = heappop(self.gaps)
            self.slots[row] = slot
            return row
        if len(self.slots) == self.num_rows:
            self.resize(2 * self.num_rows)
        self.slots.append(slot)
        return len(self.slots) - 1

    def release(self, row: int) -> None:
        self.slots[row] = NOBODY
        heappush(self.gaps, row)

    def close_gaps(self) -> list[int]:
        """Move the last rows to where rows were released; the indices of rows that moved are returned."""
        moved = []
        for row in sorted(self.gaps):
            while self.slots[-1] == NOBODY:
                self.slots.pop()
            if row >= len(self.slots):
                break
            last = self.slots.pop()
            copy_into(self.row(row), self.row(len(self.slots)))
            self.slots[row] = last
            moved.append(row)
        self.gaps.clear()
        while self.num_rows > MIN_ROWS and len(self.slots) <= self.num_rows // 4:
            self.resize(self.num_rows // 2)
        return moved

    def clear(self) -> None:
        """Forget the gaps of a bucket that has nothing else."""
        self.slots.clear()
        self.gaps.clear()

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
        self.num_likely = MIN_ROWS
        """Rows that a new bucket may soon have."""
        self.spare: dict[int, RowBucket] = {}
        """Buckets without rows. Where all conversations wait for their environments, the next turn finds the memory
        of the last one here: new memory costs more than what is written to it."""

    def bucket_size(self, num_tokens: int) -> int:
        """The size of the bucket for a row of so many tokens."""
        size = MIN_SIZE
        while size < num_tokens:
            size *= 2
        return min(size, max(self.longest, num_tokens))

    def row_size(self, slot: int) -> int:
        return self.location[slot][0]

    def bucket(self, size: int) -> RowBucket:
        """The bucket of a size; a new one takes the place of all spare ones."""
        if size not in self.buckets:
            found = self.spare.pop(size, None)
            if found is None:
                self.spare.clear()
                found = RowBucket(self.layout, size, self.first_rows())
            self.buckets[size] = found
        return self.buckets[size]

    def first_rows(self) -> int:
        """How many rows a new bucket has memory for. On a CPU rows that are never written cost nothing."""
        rows = MIN_ROWS
        while self.layout.device == "cpu" and rows < self.num_likely:
            rows *= 2
        return rows

    def allocate(self, slot: int, num_tokens: int, pieces: Iterable[KVStates] = ()) -> None:
        """Give a slot a row for so many tokens, which begins with copies of the pieces."""
        size = self.bucket_size(num_tokens)
        bucket = self.bucket(size)
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
        self.buckets[size].release(row)

    def release(self, slot: int) -> None:
        """Take a slot's row away."""
        size, row = self.location.pop(slot)
        self.buckets[size].release(row)

    def close_gaps(self) -> None:
        """Let every bucket have its rows one after the other, as attention reads them. Not at every release: where all
        rows of a bucket are released before the next pass, none has to move."""
        for size, bucket in list(self.buckets.items()):
            if bucket.is_empty:
                self.set_aside(size)
            elif bucket.gaps:
                for row in bucket.close_gaps():
                    self.location[bucket.slots[row]] = size, row

    def set_aside(self, size: int) -> None:
        """Keep the memory of an empty bucket for a while, if it is not too much."""
        bucket = self.buckets.pop(size)
        if bucket.num_bytes + sum(each.num_bytes for each in self.spare.values()) <= MOST_SPARE:
            bucket.clear()
            self.spare[size] = bucket

    def states(self, slot: int, start: int, end: int) -> KVStates:
        """The keys and values of some of the tokens of a slot's row."""
        size, row = self.location[slot]
        return token_range(self.buckets[size].row(row), start, end)
