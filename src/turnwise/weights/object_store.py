"""Weights in the object store of a Ray cluster."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch


class StoredWeights(Mapping[str, torch.Tensor]):
    """Weights by name, in the object store. The process of the training loop passes the reference on without fetching
    them; reading one tensor fetches all."""

    def __init__(self, reference: Any, version: int | None = None) -> None:
        self.reference = reference
        """To arrays by name in the object store."""
        self.version = version
        """None before they are published."""

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor]) -> StoredWeights:
        """These weights, put into the object store if they are not there."""
        import ray

        if isinstance(weights, StoredWeights):
            return weights
        return cls(ray.put({name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}))

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        import ray

        return tensors_of_arrays(ray.get(self.reference))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class ObjectStore:
    """Publishes weights to the replicas of a Ray cluster; weights that are in its object store are not copied."""

    def __init__(self) -> None:
        self.newest: StoredWeights | None = None

    def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> StoredWeights:
        self.newest = StoredWeights(StoredWeights.of(weights).reference, version)
        return self.newest

    def close(self) -> None:
        self.newest = None


def tensors_of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Read-only arrays of the object store as tensors, without a copy; nobody may write to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
