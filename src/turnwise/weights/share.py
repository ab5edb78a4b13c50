"""A share: what one process of a learner has of the weights. Transports write it, put it or send it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.weights.manifest import Outline

Added = Callable[[str], Tensor | None]
"""What is added to the weight of a name before anybody else gets it, whole; None where nothing is."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor.

    Example:
        Part("lm_head.weight", (slice(0, 32), slice(0, 8)), values)
    """

    name: str
    place: tuple[slice, ...]
    """Where it is in the whole tensor."""
    values: Tensor


def nothing(name: str) -> None:
    return None


class WeightShare:
    """The weights of a learner as one of its processes has them: whole tensors, or its parts of them.

    All processes must iterate at the same time: tensors are gathered, and what is added to them is computed, in the
    same order everywhere.
    """

    def __init__(self, tensors: Mapping[str, Any], added: Added = nothing) -> None:
        """`tensors` by the names that engines know them by; names of the same object are tied."""
        self.tensors = tensors
        self.added = added
        self.outline = outline_of(tensors)

    def parts(self) -> Iterator[Part]:
        """The parts that this process has to hand on: of several processes with the same part of a tensor within its
        mesh, the first has it."""
        with torch.no_grad():
            for name in self.outline.shapes:
                found, added = part_of(self.tensors[name]), self.added(name)
                if found is not None:
                    place, values = found
                    yield Part(name, place, values if added is None else values + as_like(added[place], values))

    def whole(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, gathered from all processes, its numbers in a dtype."""
        with torch.no_grad():
            for name in self.outline.shapes:
                values, added = whole_tensor(self.tensors[name]), self.added(name)
                total = values if added is None else values + as_like(added, values)
                yield name, total.to(dtype if total.is_floating_point() else total.dtype).contiguous()


def outline_of(tensors: Mapping[str, Any]) -> Outline:
    """The outline of tensors that may be divided among processes."""
    first_names: dict[int, str] = {}
    aliases = {
        name: first for name, tensor in tensors.items() if (first := first_names.setdefault(id(tensor), name)) != name
    }
    return Outline(
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items() if name not in aliases}, aliases
    )


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


def whole_tensor(tensor: Any) -> Tensor:
    """The whole tensor. If it is divided, it is gathered from all processes, and all of them must call this."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()


def as_like(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor.to(other.device, other.dtype)


def other_rank() -> bool:
    """Whether this is one of several processes, and not the first."""
    return torch.distributed.is_initialized() and torch.distributed.get_rank() > 0
