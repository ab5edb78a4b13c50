"""The publisher: writes each version of the weights to a file that other processes of the machine can map."""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from turnwise.weights.manifest import Manifest, Outline, map_tensors
from turnwise.weights.parted import PartedWeights
from turnwise.weights.published import Published
from turnwise.weights.shared_memory import shared_memory_folder
from turnwise.weights.stages import stage

PREFIX = "turnwise-weights-"
LOCK = "lock"
OPEN: WeakSet[Publisher] = WeakSet()


class Publisher:
    """A folder with the newest version of the weights, in shared memory unless another one is named.

    A file gets its final name once it is complete, so that a killed writer leaves nothing that could be read. It is
    removed when a newer one is there; readers keep it mapped for as long as they need it. The folder is locked while
    this process lives: the next publisher removes the folder of one that was killed.

    Example:
        publisher = Publisher()
        weights = publisher.publish(learner.publish(), version=3)
    """

    def __init__(self, parent: Path | None = None, dtype: torch.dtype | None = None) -> None:
        """With a `dtype` floating-point numbers are written in it."""
        self.dtype = dtype
        self.parent = parent or shared_memory_folder()
        self.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.parent)
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=self.parent))
        self.lock = os.open(hidden / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.folder = self.parent / hidden.name[1:]
        os.rename(hidden, self.folder)  # locked before others see it
        self.newest: Published | None = None
        self.is_open = True
        OPEN.add(self)

    def publish(self, weights: Mapping[str, Any], version: int) -> Published:
        """A copy of these weights that others can read; the version before is removed."""
        write: Callable[[Path], object]
        if isinstance(weights, PartedWeights):
            outline, write = weights.outline, partial(weights.ask, "write")
        else:
            tensors = dict(weights)  # a lazy mapping computes each tensor once
            outline, write = Outline.of(tensors), partial(copy_into, tensors)
        manifest = Manifest.of(outline.served_in(self.dtype), version)
        token = secrets.token_hex(4)
        unfinished, final = self.folder / f".{version}-{token}.partial", self.folder / f"{version}-{token}.safetensors"
        try:
            with stage("write"):
                self.make_room(unfinished, manifest)
                write(unfinished)
            os.rename(unfinished, final)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        self.withdraw()
        self.newest = Published(final)
        return self.newest

    def make_room(self, path: Path, manifest: Manifest) -> None:
        """A new file of the whole size, with its manifest."""
        with open(path, "wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, manifest.size)  # a full memory is an error here and a crash later
            except OSError as error:
                raise ValueError(
                    f"{self.parent} has no room for {manifest.size / 2**20:.0f} MiB of weights: {error.strerror}; "
                    "make room there"
                ) from None
            file.write(manifest.head)

    def withdraw(self) -> None:
        """Remove the newest version: all who need it have read it."""
        before, self.newest = self.newest, None
        if before is not None:
            before.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove what was published; readers keep what they have open."""
        if self.is_open:
            self.is_open, self.newest = False, None
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self.lock)


def copy_into(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copy tensors into a file that has a manifest: the only copy that is made of them."""
    manifest = Manifest.read(path)
    with torch.no_grad():
        for name, mapped in map_tensors(manifest, path, shared=True).items():
            if name not in manifest.aliases:
                mapped.copy_(tensors[name])


@atexit.register
def close_all() -> None:
    """Remove everything that this process has published and not closed."""
    for publisher in list(OPEN):
        publisher.close()


def remove_abandoned(parent: Path) -> None:
    """Remove folders of publishers whose process ended without closing them: nobody holds their lock."""
    for folder in parent.glob(f"{PREFIX}*"):
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
