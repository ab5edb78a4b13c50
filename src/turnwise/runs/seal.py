"""The seal of a file: a checksum of all its bytes that stands in the file itself, so that no list beside it can be lost
or lag behind.

It is computed with zeros in its own place.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from turnwise.runs.checksums import Damaged

MARK = b"sha256:"
BLANK = (MARK + b"0" * 64).decode()
"""What a writer puts into a file, once, after all that could look like it."""
_SEAL = re.compile(rb"sha256:([0-9a-f]{64})")


def sealed(data: bytes | memoryview) -> bytearray:
    """The same bytes with a seal in place of the last blank."""
    content = bytearray(data)
    place = content.rfind(BLANK.encode())
    assert place >= 0, "a file without a place for its seal"
    content[place : place + len(BLANK)] = MARK + hashlib.sha256(content).hexdigest().encode()
    return content


def read_intact(path: Path) -> bytes:
    """The bytes of a file that has a seal; Damaged where they are not those that were written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}); restore it from a copy") from None
    if is_intact(data) is False:
        raise Damaged(f"{path} is damaged: it does not match its checksum; remove it or restore it from a copy")
    return data


def is_intact(data: bytes) -> bool | None:
    """Whether the bytes are those that were sealed; None where they have no seal."""
    place = data.rfind(MARK)
    found = _SEAL.match(data, place) if place >= 0 else None
    if found is None:
        return None
    digest = hashlib.sha256(data[:place])
    digest.update(BLANK.encode())
    digest.update(data[found.end() :])
    return digest.hexdigest().encode() == found[1]
