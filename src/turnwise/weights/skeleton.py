"""The skeleton of a model: everything but its weights, which another process reads where they are published."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from turnwise.pretrained import CausalLM

TensorKey = tuple[str, bool, bool]
"""(name in the state dict, whether it is a parameter, whether it requires a gradient)"""


def skeleton_of(model: CausalLM) -> bytes:
    """A pickle of a model without the tensors that its state dict names."""
    stream = io.BytesIO()
    WeightlessPickler(stream, model).dump(model)
    return stream.getvalue()


def model_of_skeleton(skeleton: bytes, weights: Mapping[str, Tensor]) -> CausalLM:
    """The model of a skeleton, with copies of these weights; tied tensors are tied."""
    model: CausalLM = WeightUnpickler(io.BytesIO(skeleton), weights).load()
    return model


class WeightlessPickler(pickle.Pickler):
    """Writes the names of weights in place of the weights."""

    def __init__(self, stream: io.BytesIO, model: CausalLM) -> None:
        super().__init__(stream)
        self.names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}

    def persistent_id(self, value: Any) -> TensorKey | None:
        name = self.names.get(id(value)) if isinstance(value, Tensor) else None
        return None if name is None else (name, isinstance(value, torch.nn.Parameter), value.requires_grad)


class WeightUnpickler(pickle.Unpickler):
    """Reads names of weights and makes copies of those weights, one of each name."""

    def __init__(self, stream: io.BytesIO, weights: Mapping[str, Tensor]) -> None:
        super().__init__(stream)
        self.weights = weights
        self.copies: dict[str, Tensor] = {}

    def persistent_load(self, key: TensorKey) -> Tensor:
        name, is_parameter, requires_grad = key
        if name not in self.copies:
            copy = self.weights[name].clone()
            self.copies[name] = torch.nn.Parameter(copy, requires_grad) if is_parameter else copy
        return self.copies[name]
