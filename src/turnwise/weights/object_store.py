"""The parcel: published weights that lie in the object store of a Ray cluster until somebody needs them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch


class Parcel(Mapping[str, torch.Tensor]):
    """Weights by name. Whoever runs the training loop hands them on and does not have them; to read one is to fetch
    all."""

    def __init__(self, reference: Any, version: int | None = None) -> None:
        self.reference = reference
        """Of arrays by name in the object store."""
        self.version = version
        """None where nobody has given it one yet."""

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor]) -> Parcel:
        """The parcel itself, or one with these weights in it."""
        import ray

        if isinstance(weights, Parcel):
            return weights
        return cls(ray.put({name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}))

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        import ray

        return opened(ray.get(self.reference))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class ObjectStore:
    """Publishes weights to the replicas of a Ray cluster; those that lie in its object store already stay where they
    are."""

    def __init__(self) -> None:
        self.newest: Parcel | None = None

    def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> Parcel:
        self.newest = Parcel(Parcel.of(weights).reference, version)
        return self.newest

    def close(self) -> None:
        self.newest = None


def opened(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Arrays of the object store as tensors, without a copy; nobody may write to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
