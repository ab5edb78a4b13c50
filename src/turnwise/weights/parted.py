"""Weights in parts: those of a learner over several processes, each of which writes its own part of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.weights.manifest import Manifest, Outline, map_tensors


class PartedWeights(Mapping[str, Tensor]):
    """Weights by name that no process has whole. A publisher has them written where they are read: every process copies
    its part into the mapped file, so that each byte is copied once and nothing is gathered or pickled.

    They are those of the moment at which they are written, and may be written until the next update.

    Example:
        PartedWeights(outline, write=ranks.write, read=lambda weights: publisher.publish(weights, 0))
    """

    def __init__(
        self,
        outline: Outline,
        write: Callable[[Path], None],
        read: Callable[[PartedWeights], Mapping[str, Tensor]],
    ) -> None:
        self.outline = outline
        self.write = write
        """Has every process write its part into a file that has its manifest and its size."""
        self.read = read
        """These weights where this process can read them."""

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.read(self)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.outline.shapes
        yield from self.outline.aliases

    def __len__(self) -> int:
        return len(self.outline.shapes) + len(self.outline.aliases)


def outline_of(tensors: Mapping[str, Any]) -> Outline:
    """The outline of tensors that may be divided among processes."""
    first_names: dict[int, str] = {}
    aliases = {
        name: first for name, tensor in tensors.items() if (first := first_names.setdefault(id(tensor), name)) != name
    }
    return Outline(
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items() if name not in aliases}, aliases
    )


def write_parts(tensors: Mapping[str, Any], path: Path) -> int:
    """Copy this process's part of tensors into a file that has a manifest. Of several processes that have the same part
    of a tensor within its mesh, the first writes it. Returns how many bytes were written."""
    manifest, written = Manifest.read(path), 0
    mapped = map_tensors(manifest, path, shared=True)
    for name in manifest.entries:
        if (part := part_of(tensors[name])) is not None:
            (place, values), target = part, mapped[name]
            target[place].copy_(values)
            written += values.numel() * target.element_size()
    return written


def part_of(tensor: Any) -> tuple[tuple[slice, ...], Tensor] | None:
    """(where this process's part of a tensor is, the part); None where another process has the same part."""
    if not hasattr(tensor, "device_mesh"):
        whole = tuple(slice(0, size) for size in tensor.shape)
        return None if other_rank() else (whole, tensor.detach())
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    copies = [at for at, placement in zip(coordinate, placements, strict=True) if isinstance(placement, Replicate)]
    if any(copies):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    place = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return place, tensor.to_local().detach()


def other_rank() -> bool:
    """Whether this is one of several processes, and not the first."""
    return torch.distributed.is_initialized() and torch.distributed.get_rank() > 0
