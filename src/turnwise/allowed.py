"""The tokens that a grammar left to sample from, one set per action token, kept small.

Letters: A action tokens of a turn, S distinct sets, V vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnwise.tokens import Tokens, frozen_array

Bits = NDArray[np.uint8]
"""[rows, V / 8] a bit per token, the lowest bit of a byte first."""
LARGEST_SET = 1 << 21
"""Bytes that a set may have: enough for 16 million tokens."""
LEVEL = 1
"""Of compression: higher levels save a tenth and take several times as long."""


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """Which tokens each action token of a turn was drawn from.

    Inside a string of JSON nearly every token is allowed and the set is the same from one token to the next; between
    two keys a handful is. So each distinct set is kept once, as compressed bits. Equal sets of several turns are best
    given as one object, which a pickle holds once.

    Example:
        Allowed(places=[0, 1, 1, 0], sets=(pack_set([5, 9], 512), pack_set(range(100), 512)))
    """

    places: Tokens
    """[A] which of the sets."""
    sets: tuple[bytes, ...]
    """[S] compressed bits, as `compress` makes them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", frozen_array(self.places, np.int32, "Allowed.places"))
        object.__setattr__(self, "sets", tuple(self.sets))
        if len(self.places) and not 0 <= self.places.min() <= self.places.max() < len(self.sets):
            raise ValueError(f"each token names one of its turn's {len(self.sets)} sets of allowed tokens")

    def __reduce__(self) -> tuple[type[Allowed], tuple[Tokens, tuple[bytes, ...]]]:
        return Allowed, (self.places, self.sets)

    @property
    def num_bytes(self) -> int:
        """What it takes to keep this, if no other turn has the same sets."""
        return self.places.nbytes + sum(map(len, self.sets))

    def allows(self, tokens: Tokens) -> NDArray[np.bool_]:
        """[A] whether each token is in its set."""
        return in_sets(bits_of(self.sets), self.places, tokens)

    def dense(self, vocabulary: int) -> NDArray[np.bool_]:
        """[A, V] whether each of the first V tokens was allowed."""
        bits = np.unpackbits(bits_of(self.sets, -(-vocabulary // 8)), axis=1, bitorder="little")
        return bits[:, :vocabulary].astype(bool)[self.places]


def join_allowed(parts: Sequence[Allowed], count: int) -> Allowed:
    """What the first `count` tokens of several runs of tokens, one after another, were drawn from."""
    index: dict[bytes, int] = {}
    places = [index.setdefault(part.sets[place], len(index)) for part in parts for place in part.places.tolist()]
    return Allowed(np.array(places[:count], np.int32), tuple(index))


def in_sets(bits: Bits, places: NDArray[np.integer], tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether each token is in the set at its place."""
    byte, bit = tokens >> 3, (tokens & 7).astype(np.uint8)
    inside: NDArray[np.bool_] = byte < bits.shape[1]
    if inside.any():
        inside &= (bits[places, np.where(inside, byte, 0)] >> bit & 1).astype(bool)
    return inside


def compress(row: Bits) -> bytes:
    """The bits of one set, small. Trailing zeros are left out, so that padding of a vocabulary changes nothing."""
    return zlib.compress(row.tobytes().rstrip(b"\0"), LEVEL)


def decompress(packed: bytes) -> Bits:
    """Inverse of `compress`, up to zeros at the end."""
    reader = zlib.decompressobj()
    try:
        raw = reader.decompress(packed, LARGEST_SET)
    except zlib.error as error:
        raise ValueError(f"a set of allowed tokens cannot be read: {error}") from None
    if not reader.eof:
        raise ValueError(f"a set of allowed tokens has more than {LARGEST_SET} bytes, or is cut short")
    return np.frombuffer(raw, np.uint8)


def pack_set(tokens: Iterable[int], vocabulary: int) -> bytes:
    """The set of some tokens."""
    dense = np.zeros(vocabulary, bool)
    dense[list(tokens)] = True
    return compress(np.packbits(dense, bitorder="little"))


def bits_of(sets: Sequence[bytes], width: int = 0) -> Bits:
    """[S, longest set, and at least `width`] the bits of sets, one below the other."""
    rows = [decompress(packed) for packed in sets]
    bits = np.zeros((len(rows), max([width, *map(len, rows)])), np.uint8)
    for index, row in enumerate(rows):
        bits[index, : len(row)] = row
    return bits
