"""Sharding: transformers' plans spread layers and experts over ranks, and FSDP2 spreads what is left of the weights and
gathers it layer by layer during a pass. A model is sharded on the meta device, before it has any weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from turnwise.cluster.mesh import Mesh
from turnwise.learn.casting import layers_of
from turnwise.learn.stepper import Sums
from turnwise.pretrained import CausalLM

DISPATCHED = "ep_dispatch_experts"
"""transformers' name for experts to which tokens are sent."""
PARTIAL = "replicated_with_grad_allreduce"
"""transformers' name for weights that every rank has whole, and of whose gradient it has a part."""


class Shell(torch.nn.Module):
    """The root module for FSDP. A pass runs inside its forward, because a policy uses the output embedding outside the
    model's forward, and the output embedding may be tied to the input embedding."""

    def __init__(self, model: CausalLM, head: torch.nn.Linear | None = None) -> None:
        super().__init__()
        self.model = model
        self.head = head
        """Of a critic."""

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def sync_gradients(self, is_last: bool) -> None:
        """Have the next backward pass add gradients up over ranks, or keep them where they are."""
        assert isinstance(self, FSDPModule)
        self.set_requires_gradient_sync(is_last)


def shard(shell: Shell, mesh: Mesh, dtype: torch.dtype, offload: bool = False) -> None:
    """Shard the weights of a model that has none yet. All ranks must then make its passes together, which compute in
    the given dtype. With `offload` weights and gradients stay in the memory of the host between passes.

    Gradients are summed over ranks, not averaged: a token's weight is its share of the whole mini-batch.
    """
    model = shell.model
    # transformers ties embeddings after it has loaded them. FSDP must know before: for two weights that become one it
    # would keep two buffers, and where rows are padded, only one of them is what the optimizer changes.
    model.tie_weights()
    tp_plan, ep_plan = plans_of(model, mesh)
    if tp_plan:
        apply_tensor_parallelism(model, mesh, tp_plan)
    if ep_plan:
        apply_expert_parallelism(model, mesh, ep_plan)
    widened = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=widened, cast_forward_inputs=True)
    where = CPUOffloadPolicy(pin_memory=mesh.device == "cuda") if offload else OffloadPolicy()
    how: dict[str, Any] = {"reshard_after_forward": True, "mp_policy": policy, "offload_policy": where}
    for experts in dispatched_experts(model, ep_plan):
        fully_shard(experts, mesh=mesh.of_expert_weights(), **how)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh.of_weights(), **how)
    if shell.head is not None:  # values may differ by a few percent: the product that yields them is not rounded
        whole = MixedPrecisionPolicy(param_dtype=widened, reduce_dtype=widened, cast_forward_inputs=True)
        fully_shard(shell.head, mesh=mesh.of_weights(), **{**how, "mp_policy": whole})
    fully_shard(shell, mesh=mesh.of_weights(), **how)
    for module in shell.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


# ---------------------------------------------------------------- transformers' plans


def plans_of(model: CausalLM, mesh: Mesh) -> tuple[dict[str, str], dict[str, str]]:
    """transformers' (tensor-parallel plan, expert-parallel plan) of a model; empty where a mesh has no such dimension.

    The embeddings are left out: see `divide_vocabulary`.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import resolve_parallel_plans

    shape = mesh.shape
    sizes = DistributedConfig(tp_size=shape.tp, fsdp_size=shape.num_shards, ep_size=shape.ep)
    tp_plan, ep_plan = resolve_parallel_plans(model, sizes)
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {name for name, module in model.named_modules() if any(module is each for each in embeddings)}
    return {name: style for name, style in tp_plan.items() if name not in names}, ep_plan


def apply_tensor_parallelism(model: CausalLM, mesh: Mesh, plan: dict[str, str]) -> None:
    from transformers.distributed import tensor_parallel

    ours = {name: style for name, style in plan.items() if style != PARTIAL}
    tensor_parallel.apply_tensor_parallelism(model, mesh.dense["tp"], ours)
    divide_vocabulary(model, mesh)
    group = mesh.dense["tp"].get_group()
    for name, module in model.named_modules():
        if plan.get(tensor_parallel.replace_layer_number_by_wildcard(name)) == PARTIAL:
            add_up_gradients(module, group)


def divide_vocabulary(model: CausalLM, mesh: Mesh) -> None:
    """Give each rank that computes layers together with others some rows of both embeddings. The output embedding stays
    a weight that a policy multiplies with, and the two stay tied if they are."""
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = output.weight is table.weight
    style = ALL_PARALLEL_STYLES["embedding_rowwise"]
    style.shard_param(table, "weight", mesh.dense["tp"])
    style.install_forward(table, mesh.dense["tp"])
    if is_tied:
        output._parameters["weight"] = table._parameters["weight"]
    else:
        ALL_PARALLEL_STYLES["colwise"].shard_param(output, "weight", mesh.dense["tp"])


def apply_expert_parallelism(model: CausalLM, mesh: Mesh, plan: dict[str, str]) -> None:
    from transformers.distributed import tensor_parallel

    assert mesh.experts is not None
    tensor_parallel.apply_expert_parallelism(model, mesh.experts["ep"], mesh.dense["tp"], plan)


def dispatched_experts(model: CausalLM, plan: dict[str, str]) -> Iterator[torch.nn.Module]:
    from transformers.distributed.tensor_parallel import replace_layer_number_by_wildcard

    for name, module in model.named_modules():
        if plan.get(replace_layer_number_by_wildcard(name)) == DISPATCHED:
            yield module


class AddedUp(torch.autograd.Function):
    """A tensor that all ranks of a group have, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def add_up_gradients(module: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Have a module's weights collect their gradient from all ranks of a group, each of which computes with them on its
    own heads. transformers adds up what has been accumulated, and would count earlier passes of an update again."""
    plain_forward = module.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        with collecting(module, group):
            return plain_forward(*arguments, **named)

    module.forward = forward


@contextmanager
def collecting(module: torch.nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    own = dict(module._parameters)
    try:
        for name, parameter in own.items():
            if parameter is not None:
                module._parameters[name] = AddedUp.apply(parameter, group)  # type: ignore[no-untyped-call]
        yield
    finally:
        module._parameters.update(own)


# ---------------------------------------------------------------- over ranks


def reduce_sums(sums: Sums, group: dist.ProcessGroup | None = None) -> Sums:
    """The sums added up over the ranks of a group. All of them must have the same names."""
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    names = sorted(sums)
    numbers = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(numbers, group=group)
    return dict(zip(names, numbers.tolist(), strict=True))
