"""Weights in the object store of a Ray cluster, in the parts in which the processes of a learner have them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turnwise.weights.manifest import CODES, DTYPES, Outline
from turnwise.weights.parted import PartedWeights
from turnwise.weights.share import Part, WeightShare
from turnwise.weights.stages import stage


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor as the object store holds it: bytes, because arrays have no bfloat16. They lie in memory that
    all processes of a node map."""

    name: str
    place: tuple[slice, ...]
    code: str
    """Of the dtype, as in a manifest."""
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, part: Part, dtype: torch.dtype | None) -> StoredPart:
        values = part.values.detach().to("cpu", dtype if part.values.is_floating_point() else None).contiguous()
        return cls(part.name, part.place, CODES[values.dtype], values.view(-1).view(torch.uint8).numpy())

    @property
    def values(self) -> Tensor:
        """The numbers, without a copy; nobody may write to them."""
        shape = [each.stop - each.start for each in self.place]
        if not self.data.size:
            return torch.empty(shape, dtype=DTYPES[self.code])
        return tensor_of(self.data).view(DTYPES[self.code]).view(shape)


class AssembledWeights(Mapping[str, Tensor]):
    """Weights by name from the parts of all processes. A tensor is put together when it is read, and no sooner, so that
    one of them at a time is held twice; a tensor in one part is read where it lies."""

    def __init__(self, outline: Outline, stored: Iterable[Sequence[StoredPart]]) -> None:
        self.outline = outline
        self.parts: dict[str, list[StoredPart]] = {}
        for of_rank in stored:
            for part in of_rank:
                self.parts.setdefault(part.name, []).append(part)
        for name, (_, shape) in outline.shapes.items():
            # Ranks that compute layers together may each have a tensor whole.
            places = {tuple((each.start, each.stop) for each in part.place) for part in self.parts.get(name, ())}
            there = sum(math.prod(stop - start for start, stop in place) for place in places)
            if there != math.prod(shape) and tuple((0, size) for size in shape) not in places:
                raise ValueError(f"{there} of the {math.prod(shape)} numbers of {name} are there; a rank put no part")

    def __getitem__(self, name: str) -> Tensor:
        first = self.outline.aliases.get(name, name)
        dtype, shape = self.outline.shapes[first]
        parts = self.parts[first]
        everything = tuple(slice(0, size) for size in shape)
        if (all_of_it := next((part for part in parts if part.place == everything), None)) is not None:
            return all_of_it.values
        whole = torch.empty(shape, dtype=dtype)
        for part in parts:
            whole[part.place] = part.values
        return whole

    def __iter__(self) -> Iterator[str]:
        yield from self.outline.shapes
        yield from self.outline.aliases

    def __len__(self) -> int:
        return len(self.outline.shapes) + len(self.outline.aliases)


class StoredWeights(Mapping[str, Tensor]):
    """Weights by name, in the object store. The process of the training loop passes references on without fetching
    them; reading one tensor fetches the parts of all."""

    def __init__(self, outline: Outline, references: Sequence[Any], version: int) -> None:
        self.outline = outline
        self.references = tuple(references)
        """To the parts of each process."""
        self.version = version

    @cached_property
    def tensors(self) -> AssembledWeights:
        import ray

        return AssembledWeights(self.outline, ray.get(list(self.references)))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.outline.shapes
        yield from self.outline.aliases

    def __len__(self) -> int:
        return len(self.outline.shapes) + len(self.outline.aliases)


class ObjectStore:
    """Publishes weights to the replicas of a Ray cluster: every process of a learner puts its own part there.
    Weights that are there already are not copied."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """With a `dtype` floating-point numbers are put in it: replicas that compute in it need no more."""
        self.dtype = dtype
        self.newest: StoredWeights | None = None

    def publish(self, weights: Mapping[str, Tensor], version: int) -> StoredWeights:
        with stage("write"):
            self.newest = self.stored(weights, version)
        return self.newest

    def stored(self, weights: Mapping[str, Tensor], version: int) -> StoredWeights:
        import ray

        if isinstance(weights, StoredWeights):
            return StoredWeights(weights.outline, weights.references, version)
        if isinstance(weights, PartedWeights):
            return StoredWeights(weights.outline.served_in(self.dtype), weights.ask("put", self.dtype), version)
        tensors = dict(weights)
        outline = Outline.of(tensors)
        share = WeightShare({name: tensors[name] for name in outline.shapes})
        return StoredWeights(outline.served_in(self.dtype), [ray.put(stored_parts(share, self.dtype))], version)

    def close(self) -> None:
        self.newest = None


def stored_parts(share: WeightShare, dtype: torch.dtype | None) -> list[StoredPart]:
    """A process's share as the object store holds it."""
    return [StoredPart.of(part, dtype) for part in share.parts()]


def tensor_of(array: np.ndarray) -> Tensor:
    """A read-only array of the object store as a tensor, without a copy; nobody may write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def tensors_of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: tensor_of(array) for name, array in arrays.items()}
