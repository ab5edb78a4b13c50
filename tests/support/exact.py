"""Models that compute in float64 throughout, where transformers goes through float32 or has no kernel for it."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from turnwise.learn.transformers_reference import rms_norm
from turnwise.pretrained import import_models


class Wide(TorchDispatchMode):
    """Keeps float64 where a module would go through float32, as routers do for their probabilities."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32 and args and isinstance(args[0], Tensor):
            kwargs["dtype"] = torch.promote_types(args[0].dtype, torch.float32)
        return func(*args, **kwargs)


def make_exact(model: torch.nn.Module) -> None:
    """Have norms, routers and experts of a model compute in the dtype they are given. PyTorch multiplies grouped
    matrices in 32 bits and fewer; transformers' own product, one expert after the other, takes any."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            module.forward = MethodType(rms_norm, module)
        elif name.endswith("Router"):
            module.forward = partial(widely, module.forward)
    import_models()
    from transformers.integrations import moe

    if not isinstance(moe._can_use_grouped_mm, partial):
        moe._can_use_grouped_mm = partial(has_a_kernel, moe._can_use_grouped_mm)


def widely(forward: Any, *arguments: Any, **named: Any) -> Any:
    with Wide():
        return forward(*arguments, **named)


def has_a_kernel(by_transformers: Any, given: Tensor, weight: Tensor, offsets: Tensor) -> bool:
    return weight.dtype is not torch.float64 and bool(by_transformers(given, weight, offsets))
