"""Tied tensors: several names of one tensor, such as an output layer that is the embedding."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name that belongs to the tensor of an earlier name, and that name.

    Tensors are one if they have the same memory, dtype, shape and strides: a part of a tensor is another tensor.

    Example:
        tied_names(model.state_dict()) == {"lm_head.weight": "model.embed_tokens.weight"}
    """
    first_names: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in tensors.items():
        # Empty tensors have no memory that could be compared.
        key = (tensor.data_ptr() or name, tensor.dtype, tensor.shape, tensor.stride())
        if (first := first_names.setdefault(key, name)) != name:
            tied[name] = first
    return tied
