"""Files and folders that are either whole or not there, whenever the process dies.

What is being written has a hidden name of its own beside its final place, so two processes that write the same thing
(a shared cache) do not meet. What a kill leaves behind is cleared by the one process that owns a folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from turnwise.disk import named_failures


def write_atomically(path: Path, data: bytes | memoryview | str) -> None:
    """Put `data` at `path`, on disk when this returns; a reader sees the old content or the new, never a part."""
    aside = partial(path)
    try:
        with open(aside, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_durably(path: Path, data: bytes) -> None:
    """Add `data` to the end of a file, on disk when this returns; where that fails, the file is as it was."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(handle).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)
    if not size:
        sync_folder(path.parent)


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final` which becomes `final` when the block ends, and vanishes when it raises.

    A folder that is at `final` already is replaced. No rename swaps two folders, so the old one waits under the name
    `replaced(final)` until the new one is in place: a reader that finds nothing at `final` looks there.
    """
    aside, old = partial(final), replaced(final)
    aside.mkdir(parents=True)
    try:
        with named_failures(aside):
            yield aside
        sync_tree(aside)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(aside, final)
    except BaseException:
        if old.exists() and not final.exists():
            os.rename(old, final)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder which nobody sees half removed: it leaves its name first."""
    aside = partial(path)
    os.rename(path, aside)
    shutil.rmtree(aside)


def clear_leftovers(folder: Path) -> None:
    """Remove what a kill left half written in `folder`, and put back what it left half replaced."""
    for path in folder.glob(".*.replaced"):
        final = path.with_name(path.name[1 : -len(".replaced")])
        if final.exists():
            shutil.rmtree(path)
        else:
            os.rename(path, final)
    for path in folder.glob(".*.partial"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def partial(final: Path) -> Path:
    """A new name beside `final`, for what is not whole."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}.partial")


def replaced(final: Path) -> Path:
    """Where the old folder waits while a new one takes its place at `final`."""
    return final.with_name(f".{final.name}.replaced")


def sync_tree(folder: Path) -> None:
    """Force every file and folder under `folder`, itself included, to disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            file = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        sync_folder(Path(place))


def sync_folder(folder: Path) -> None:
    """Force the names in `folder` to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network and FUSE file systems refuse to sync a folder and offer nothing instead.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
