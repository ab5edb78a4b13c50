"""Weights in files that servers read: each version is written once, however many servers there are."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from turnwise.weights.published import Published
from turnwise.weights.publisher import Publisher


class ServedFiles:
    """The newest version as servers read it: in their dtype, each tensor once.

    Example:
        store = ServedFiles(torch.bfloat16, Path("/mnt/shared"))
        weights = store.publish(learner.publish(), version=3)
    """

    def __init__(self, dtype: torch.dtype, folder: Path | None = None) -> None:
        """The folder must be one that the servers see; None is the memory of this machine."""
        # A machine cannot tell whether the publisher of another one is alive, and would remove its files.
        self.publisher = Publisher(folder / f"turnwise-{socket.gethostname()}" if folder else None, dtype)

    @property
    def newest(self) -> Published | None:
        return self.publisher.newest

    def publish(self, weights: Mapping[str, Any], version: int) -> Published:
        """A file of these weights; that of the version before is removed."""
        return self.publisher.publish(weights, version)

    def close(self) -> None:
        self.publisher.close()


class LiveWeights:
    """The learner's own tensors, sent without a copy. They change with the next update, so that a server which comes
    back between two loads cannot be given them."""

    def __init__(self, first: Mapping[str, Any] | None, version: int) -> None:
        self.newest = None if first is None else VersionedWeights(first, version)
        """The weights of the start, until others are published."""

    def publish(self, weights: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        self.newest = None
        return weights

    def close(self) -> None:
        self.newest = None


class VersionedWeights(dict[str, Any]):
    """Weights by name, and their version."""

    def __init__(self, weights: Mapping[str, Any], version: int) -> None:
        super().__init__(weights)
        self.version = version
