"""The output layer of an engine: from hidden states to logits, with its weight laid out for the kernels of a CPU.

The output layer is by far the largest matrix of a small model. For the few rows of a pass PyTorch's product with it
takes twice as long as oneDNN's with a weight that was reordered into blocks. The blocks are a copy of the weight, so
each load of weights makes them again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from turnwise.pretrained import CausalLM

Head = Callable[[Tensor], Tensor]

TYPICAL_ROWS = 64
"""Blocks for this many rows suit any number of rows but one."""


def head_of(model: CausalLM, dtype: torch.dtype) -> Head:
    """The output layer with its present weight in blocks; the module itself where blocks cannot be used."""
    module = model.get_output_embeddings()
    # A module of another class, or one with hooks, may compute something else.
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return module
    weight = module.weight.detach()
    on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if not on_cpu or not dtype == weight.dtype == torch.float32:
        return module
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
    bias = None if module.bias is None else module.bias.detach()

    def logits(hidden: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(hidden, blocks, bias, "none", [], "")  # type: ignore[no-any-return]

    return logits
