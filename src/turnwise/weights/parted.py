"""Weights in parts: those of a learner over several processes, none of which has them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from turnwise.weights.manifest import Manifest, Outline, map_tensors
from turnwise.weights.share import WeightShare


class SendingRank(Protocol):
    """What one process of a learner does for a transport, at the same time as all the others."""

    def write(self, path: Path) -> int:
        """Write its part into a file of this machine that has a manifest; how many bytes."""
        ...

    def put(self, dtype: torch.dtype | None) -> Any:
        """Put its part into the object store of a Ray cluster, its numbers in a dtype; what refers to it there."""
        ...

    def send(self, route: Any, version: int) -> None:
        """Send whole tensors through vLLM's weight transfer, all ranks in lockstep: `vllm_native.Route`."""
        ...


class PartedWeights(Mapping[str, Tensor]):
    """Weights by name that no process has whole. A transport asks all processes to hand on their parts, in a way that
    both it and they know; the process that holds this has no tensor until somebody reads one.

    They are those of the moment at which they are handed on, and may be until the next update.

    Example:
        weights = PartedWeights(outline, ask=learner.ask, read=publish_and_map)
        weights.ask("write", path)
    """

    def __init__(
        self, outline: Outline, ask: Callable[..., list[Any]], read: Callable[[PartedWeights], Mapping[str, Tensor]]
    ) -> None:
        self.outline = outline
        self.ask = ask
        """(name of a method of `SendingRank`, its arguments) -> what every process answered."""
        self.read = read
        """These weights where this process can read them."""
        self.reading = Lock()

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.read(self)

    def fetch(self) -> None:
        """Have the weights where this process can read them. Blocks meanwhile: call it in a thread."""
        with self.reading:
            assert self.tensors is not None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.outline.shapes
        yield from self.outline.aliases

    def __len__(self) -> int:
        return len(self.outline.shapes) + len(self.outline.aliases)


def write_parts(share: WeightShare, path: Path) -> int:
    """Copy this process's parts into a file that has a manifest, whose dtypes the numbers get. Returns how many bytes
    were written."""
    mapped, written = map_tensors(Manifest.read(path), path, shared=True), 0
    for part in share.parts():
        target = mapped[part.name][part.place]
        target.copy_(part.values)
        written += target.numel() * target.element_size()
    return written
