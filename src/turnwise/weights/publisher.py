"""The publisher: puts weights where other processes of the machine find them, a file for each version."""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from turnwise.weights.manifest import Manifest, places
from turnwise.weights.published import Published

MEMORY = Path("/dev/shm")
PREFIX = "turnwise-weights-"
LOCK = "lock"
OPEN: WeakSet[Publisher] = WeakSet()


class Publisher:
    """A folder with the newest version of the weights, in memory unless another place is named.

    A file has its name once it is whole, so that a writer which is killed leaves nothing that could be read. It loses
    its name when a newer one has taken its place; readers keep it for as long as they need it. The folder is locked
    while this process lives: one whose owner was killed is cleared away by the next publisher.

    Example:
        publisher = Publisher()
        weights = publisher.publish(learner.publish(), version=3)
    """

    def __init__(self, place: Path | None = None) -> None:
        self.place = place or (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))
        self.place.mkdir(parents=True, exist_ok=True)
        clear_abandoned(self.place)
        aside = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=self.place))
        self.lock = os.open(aside / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.folder = self.place / aside.name[1:]
        os.rename(aside, self.folder)  # locked by the time that others see it
        self.newest: Published | None = None
        self.is_open = True
        OPEN.add(self)

    def publish(self, weights: Mapping[str, Any], version: int) -> Published:
        """A copy of these weights that others can read; the one before is removed when they have."""
        tensors = dict(weights)  # those that are made when asked for are made once
        manifest = Manifest.of(tensors, version)
        token = secrets.token_hex(4)
        aside, final = self.folder / f".{version}-{token}.partial", self.folder / f"{version}-{token}.safetensors"
        try:
            self.write(aside, manifest, tensors)
            os.rename(aside, final)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        before, self.newest = self.newest, Published(final)
        if before is not None:
            before.path.unlink(missing_ok=True)
        return self.newest

    def write(self, path: Path, manifest: Manifest, tensors: Mapping[str, Any]) -> None:
        """Copy tensors to where they shall lie; the only copy that is made of them."""
        with open(path, "wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, manifest.size)  # a full memory is an error here and a crash later
            except OSError as error:
                raise ValueError(
                    f"{self.place} has no room for {manifest.size / 2**20:.0f} MiB of weights: {error.strerror}; "
                    "make room there"
                ) from None
            file.write(manifest.head)
        with torch.no_grad():
            for name, there in places(manifest, path, shared=True).items():
                if name not in manifest.aliases:
                    there.copy_(tensors[name])

    def close(self) -> None:
        """Remove what was published; readers keep what they have open."""
        if self.is_open:
            self.is_open, self.newest = False, None
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self.lock)


@atexit.register
def close_all() -> None:
    """Remove all that this process has published, where it ends without closing anything."""
    for publisher in list(OPEN):
        publisher.close()


def clear_abandoned(place: Path) -> None:
    """Remove folders of publishers whose process has ended without doing so: nobody holds their lock."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:  # another user's, or one that is being removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(lock)
