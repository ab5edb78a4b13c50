"""Sharding: FSDP2 spreads a policy's weights over ranks and gathers them layer by layer during a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from turnwise.learn.policy import Policy
from turnwise.learn.stepper import Sums
from turnwise.pretrained import CausalLM


class Shell(torch.nn.Module):
    """The root module for FSDP. A pass runs inside its forward, because a policy uses the output embedding outside the
    model's forward, and the output embedding may be tied to the input embedding."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self.head = getattr(policy, "head", None)  # of a critic

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def shard(policy: Policy, mesh: DeviceMesh) -> Policy:
    """The policy with each parameter sharded over the ranks of a mesh. All ranks must then make its passes together.

    Gradients are summed over ranks, not averaged: a token's weight is its share of the whole mini-batch.
    """
    shell = Shell(policy)
    for layer in layers_of(policy.model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(shell, mesh=mesh, reshard_after_forward=True)
    for module in shell.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    policy.enter = shell
    return policy


def layers_of(model: CausalLM) -> list[torch.nn.Module]:
    """The modules that are gathered one by one: those that transformers lists as not to be split."""
    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in unsplit]


def reduce_sums(sums: Sums) -> Sums:
    """The sums added up over all ranks. All ranks must have the same names."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    names = sorted(sums)
    numbers = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(numbers)
    return dict(zip(names, numbers.tolist(), strict=True))


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. If it is sharded, it is gathered from all ranks, and all of them must call this."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()
