"""The disk's own failures: full, over quota, a file too large, turned read-only."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
EXIT_CODE = 3
"""Of a command that the disk has ended."""
PROBE = 1 << 20
"""Bytes that have to find room where a library failed to write and does not say why."""
_IN_RUST = re.compile(r"\(os error (\d+)\)")


def is_failure(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FAILURES


def in_words(error: OSError) -> str:
    """For a person: what could not be written, and why."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"cannot write{f' {error.filename}' if error.filename else ''} ({reason})"


@contextmanager
def named_failures(folder: Path) -> Iterator[None]:
    """Raise a failure of the disk as the OSError it is. Libraries that write into the folder have types and words of
    their own for it, and some have none: then it is tried whether there is room."""
    try:
        yield
    except (OSError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        number = _number_in(error) or _probe(folder)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(folder)) from error


def _number_in(error: BaseException) -> int | None:
    """The error number of the disk that an error or one of its causes carries."""
    seen: BaseException | None = error
    while seen is not None:
        if is_failure(seen):
            assert isinstance(seen, OSError)
            return seen.errno
        if (found := _IN_RUST.search(str(seen))) and int(found[1]) in FAILURES:
            return int(found[1])
        seen = seen.__cause__ or seen.__context__
    return None


def _probe(folder: Path) -> int | None:
    """The error number with which the disk refuses to take something small, or what is there already."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        for place, _, names in os.walk(folder):
            if any(os.path.getsize(os.path.join(place, name)) >= limit for name in names):
                return errno.EFBIG
    file = folder / ".probe"
    try:
        with open(file, "wb") as probe:
            probe.write(bytes(min(PROBE, limit) if limit != resource.RLIM_INFINITY else PROBE))
            os.fsync(probe.fileno())
    except OSError as error:
        return error.errno if is_failure(error) else None
    finally:
        with suppress(OSError):
            file.unlink()
    return None
