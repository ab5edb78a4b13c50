"""The lock of a run folder: one process trains in it at a time, and the lock dies with that process.

It is a POSIX lock (fcntl), for two reasons. NFS has it (over lockd, or as part of version 4), where flock is local or
an imitation of it. And a forked child does not inherit it: environments and engines that outlive a killed run do not
keep the folder from the next. Its price: a process that closes any handle of the file loses the lock, and one process
may take it twice. So nobody else opens the file, and who holds what in this process is written down here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

NAME = "lock"
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What a file system says that has none: NFS without lockd, Lustre without the option, some of FUSE."""

log = logging.getLogger(__name__)
_held: dict[tuple[int, int], Holder] = {}
"""By device and inode of the file: the locks of this process."""
_changing = threading.Lock()


class InUse(ValueError):
    """Another process trains in this folder."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a lock, as the file says it.

    Example:
        Holder(host="node-3", pid=4711, since="2026-03-01T12:00:00+00:00")
    """

    host: str
    pid: int
    since: str

    @classmethod
    def this_process(cls) -> Holder:
        return cls(socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"))


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a run folder until the block ends. Raises InUse, which says who has it, where another process does."""
    path = folder / NAME
    with _changing:
        handle = _open_locked(path)
        key = _key(handle)
        _held[key] = holder = Holder.this_process()
    try:
        with suppress(OSError):  # a disk that is full has locks all the same
            _write(handle, json.dumps(asdict(holder)) + "\n")
        yield
    finally:
        with suppress(OSError):
            _write(handle, "")
        with _changing:
            del _held[key]
            os.close(handle)


def _open_locked(path: Path) -> int:
    """A handle of the file at `path`, locked."""
    while True:
        if path.exists() and (owner := _held.get(_key(path))) is not None and owner.pid == os.getpid():
            raise _in_use(path, owner)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError as error:
            raise ValueError(
                f"cannot write to {path.parent} ({error.strerror}); only its owner can train there"
            ) from None
        try:
            _lock(handle, path)
            if path.exists() and _key(path) == _key(handle):  # else its owner took it away before it let go
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise _in_use(path, _read(handle)) from None
        if error.errno not in NO_LOCKS:
            raise
        log.warning(
            "the file system of %s has no locks (%s): see to it yourself that no other process trains there",
            path.parent,
            error.strerror,
        )


def _in_use(path: Path, holder: Holder | None) -> InUse:
    who = f"process {holder.pid} on {holder.host} since {holder.since}" if holder else "another process"
    return InUse(f"{path.parent} is in use by {who}; wait until it ends, or stop it")


def _read(handle: int) -> Holder | None:
    """Who wrote the file; None where its owner has not come to that yet."""
    try:
        return Holder(**json.loads(os.pread(handle, 4096, 0)))
    except (OSError, ValueError, TypeError):
        return None


def _write(handle: int, text: str) -> None:
    """Replace the content in place: a file of another inode would be another lock."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)


def _key(file: Path | int) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_dev, found.st_ino
