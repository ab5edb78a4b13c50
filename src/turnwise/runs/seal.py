"""The seal of a Parquet file: the SHA-256 of all its bytes, kept in its own footer, so that it cannot get lost.

A digest cannot be part of what it is a digest of: its place counts as 64 zeros.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from turnwise.runs.checksums import Damaged

SEAL_KEY, BLANK = b"turnwise.sha256", b"0" * 64
# Thrift's compact form of the next field being a text of 64 bytes stands between key and value.
_IN_FOOTER = re.compile(re.escape(SEAL_KEY) + rb"\x18\x40(.{64})", re.DOTALL)


def sealed(data: bytes | memoryview) -> memoryview:
    """A Parquet file in which the seal, blank in its metadata, is filled in."""
    place = _place(data)
    assert place is not None, "the metadata of the table has no blank seal"
    made = bytearray(data)
    made[place] = _digest(data, place)
    return memoryview(made)


def check_seal(data: bytes, path: Path) -> None:
    """Raise Damaged where a Parquet file is not what was sealed. One from before there were seals has nothing to be
    compared with."""
    place = _place(data)
    if place is not None and data[place] != _digest(data, place):
        raise Damaged(f"{path} is damaged: it does not match its checksum; remove it or restore it from a copy")


def _place(data: bytes | memoryview) -> slice | None:
    """Where the seal is."""
    end = len(data) - 8  # of the footer: its length and the magic come after it
    size = int.from_bytes(data[end : end + 4], "little")
    start = max(0, end - size)
    found = _IN_FOOTER.search(bytes(data[start:end])) if end > 0 else None
    return slice(start + found.start(1), start + found.end(1)) if found else None


def _digest(data: bytes | memoryview, place: slice) -> bytes:
    digest = hashlib.sha256(memoryview(data)[: place.start])
    digest.update(BLANK)
    digest.update(memoryview(data)[place.stop :])
    return digest.hexdigest().encode()
