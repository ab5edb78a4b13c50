"""Checksums of every file of a folder, so that what was written proves itself when it is read.

The file `SHA256SUMS` is written last, in the format of coreutils: `sha256sum --check SHA256SUMS` checks a folder too.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


class Damaged(ValueError):
    """A folder does not hold what was written into it."""


def write_checksums(folder: Path) -> None:
    """Seal a folder: nothing is written into it after this."""
    names = sorted(_names(folder))
    if any("\n" in name for name in names):
        raise ValueError(f"{folder} has a file with a line break in its name; rename it")
    lines = [f"{_digest(folder / name)}  {name}\n" for name in names]
    (folder / NAME).write_text("".join(lines), encoding="utf-8")


def check_checksums(folder: Path) -> None:
    """Raise Damaged, which names the first file that differs, where a folder is not what `write_checksums` saw."""
    try:
        lines = (folder / NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise Damaged(f"{folder} is damaged: it has no readable {NAME}") from None
    expected = _listed(folder, lines)
    present = set(_names(folder))
    if missing := sorted(expected.keys() - present):
        raise Damaged(f"{folder} is damaged: {missing[0]} is missing")
    if more := sorted(present - expected.keys()):
        raise Damaged(f"{folder} is damaged: {more[0]} was added after it was written")
    for name, digest in expected.items():
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise Damaged(f"{folder} is damaged: cannot read {name} ({error.strerror or error})") from None
        if found != digest:
            raise Damaged(f"{folder} is damaged: {name} does not match its checksum")


def check_file(path: Path) -> None:
    """Raise Damaged where a file differs from its line in the checksums beside it; without a line it has none."""
    try:
        lines = (path.parent / NAME).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        raise Damaged(f"{path.parent / NAME} cannot be read; restore it from a copy, or remove it") from None
    digest = _listed(path.parent, lines).get(path.name)
    if digest is not None and _digest(path) != digest:
        raise Damaged(
            f"{path} does not match its checksum; restore it from a copy, or, where you changed it on purpose, remove "
            f"{path.parent / NAME}"
        )


def checksum_line(data: bytes, name: str) -> str:
    """A line of the list, for a file of which the content is at hand."""
    return f"{hashlib.sha256(data).hexdigest()}  {name}\n"


def _listed(folder: Path, lines: list[str]) -> dict[str, str]:
    """Digests by name."""
    expected: dict[str, str] = {}
    for line in lines:
        if (match := _LINE.fullmatch(line)) is None:
            raise Damaged(f"{folder} is damaged: {NAME} is not a list of checksums")
        expected[match[2]] = match[1]
    return expected


def _names(folder: Path) -> list[str]:
    """Files under a folder, relative to it, without the checksums themselves."""
    found = [Path(place, name).relative_to(folder).as_posix() for place, _, names in os.walk(folder) for name in names]
    return [name for name in found if name != NAME]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
