"""The outline of a model: all of it but its weights, which are published and read by whoever makes a model of it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def outline_of(model: Any) -> bytes:
    """What another process needs to make this model, beside the weights that its state dict names."""
    stream = io.BytesIO()
    Outliner(stream, model).dump(model)
    return stream.getvalue()


def filled(outline: bytes, weights: Mapping[str, Tensor]) -> Any:
    """The model of an outline, with copies of these weights; tied ones are tied."""
    return Filler(io.BytesIO(outline), weights).load()


class Outliner(pickle.Pickler):
    """Writes names for tensors that have one."""

    def __init__(self, stream: io.BytesIO, model: Any) -> None:
        super().__init__(stream)
        self.names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}

    def persistent_id(self, found: Any) -> tuple[str, bool, bool] | None:
        name = self.names.get(id(found)) if isinstance(found, Tensor) else None
        return None if name is None else (name, isinstance(found, torch.nn.Parameter), found.requires_grad)


class Filler(pickle.Unpickler):
    """Reads tensors by the names that stand for them."""

    def __init__(self, stream: io.BytesIO, weights: Mapping[str, Tensor]) -> None:
        super().__init__(stream)
        self.weights = weights
        self.made: dict[str, Tensor] = {}

    def persistent_load(self, named: tuple[str, bool, bool]) -> Tensor:
        name, is_parameter, requires_grad = named
        if name not in self.made:
            own = self.weights[name].clone()
            self.made[name] = torch.nn.Parameter(own, requires_grad) if is_parameter else own
        return self.made[name]
