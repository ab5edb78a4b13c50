"""The state of optimizers: the moments that they keep of parameters, as a checkpoint has them.

Moments of 8 bits are two tensors there: codes, in the shape of the parameter, and the scale of each block, in rows of
blocks. Both are spread over ranks as the parameter is, so that another number of ranks reads the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from turnwise.learn.optimizers import BLOCK

CODES, SCALE = ".codes", ".scale"
SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""By moment that may have 8 bits: whether it may be negative."""
KEPT = {"step", "momentum_buffer", *SIGNED, *(f"{name}{part}" for name in SIGNED for part in (CODES, SCALE))}
"""All names in checkpoints."""


def plain_moments(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an optimizer keeps of a parameter, as tensors that a file can hold."""
    plain: dict[str, Tensor] = {}
    for key, value in moments.items():
        local = local_part(value)
        if not is_quantized(local):
            plain[key] = value
            continue
        plain[key + CODES] = spread_like(value, local.codes)
        plain[key + SCALE] = spread_like(value, local.scale.view(*local.shape[:-1], -1))
    return plain


def room_for(parameter: Tensor, key: str) -> Tensor:
    """Zeros in the shape and dtype of what a checkpoint has under a key."""
    if key == "step":
        return torch.zeros((), device=parameter.device)
    if key.endswith(CODES):
        return torch.zeros_like(parameter, dtype=torch.uint8)
    if key.endswith(SCALE):
        *rows, width = local_part(parameter).shape
        if width % BLOCK:
            raise ValueError(
                f"moments of 8 bits cannot be divided into rows of {width}; resume on ranks that divide weights as "
                "those did which wrote them"
            )
        return spread_like(parameter, torch.zeros((*rows, width // BLOCK), device=parameter.device))
    return torch.zeros_like(parameter)


def restored_moments(optimizer: Optimizer, parameter: Tensor, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an optimizer shall keep of a parameter, from what a checkpoint has of it."""
    keys = {key.removesuffix(CODES).removesuffix(SCALE) for key in found}
    if (("momentum_buffer" in keys) != isinstance(optimizer, torch.optim.Muon)) or keys > {"momentum_buffer"}:
        raise ValueError("this checkpoint was written by another optimizer; set optimizer.name as it was")
    return {key: restored_moment(optimizer, parameter, key, found) for key in sorted(keys)}


@torch.no_grad()
def restored_moment(optimizer: Optimizer, parameter: Tensor, key: str, found: Mapping[str, Tensor]) -> Tensor:
    if key not in SIGNED:
        return found[key].detach()
    make = getattr(optimizer, "_new_buffer", None)  # of torchao, which makes moments in the first step
    if key in found and make is None:
        return found[key].detach()
    moment: Tensor = make(parameter, SIGNED[key]) if make else torch.zeros_like(parameter)
    local = local_part(moment)
    if key in found:
        local.copy_(local_part(found[key]))
        return moment
    codes, scale = local_part(found[key + CODES]), local_part(found[key + SCALE]).flatten()
    if is_quantized(local):
        local.codes.copy_(codes)
        local.scale.copy_(scale)
    else:
        local.copy_(dequantized(codes, scale, SIGNED[key]))
    return moment


def dequantized(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit, get_qmap_signed, get_qmap_unsigned

    levels = torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned(), device=codes.device)
    values: Tensor = OptimState8bit(codes, scale, levels, signed).dequantize()
    return values


def owners(optimizers: Iterable[Optimizer]) -> dict[Tensor, Optimizer]:
    """By parameter: the optimizer that steps it."""
    return {
        parameter: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def is_quantized(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "OptimState8bit"


def local_part(tensor: Tensor) -> Any:
    """The part that this rank has of a tensor; all of one that is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(whole: Tensor, local: Tensor) -> Tensor:
    """A rank's part of a tensor that is spread as another is, with rows that may be shorter by a factor."""
    if not isinstance(whole, DTensor):
        return local
    shape = torch.Size([*whole.shape[:-1], whole.shape[-1] * local.shape[-1] // whole.to_local().shape[-1]])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, whole.device_mesh, whole.placements, run_check=False, shape=shape, stride=stride)
