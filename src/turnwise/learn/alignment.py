"""Where the weights of a model lie in memory. Kernels round differently at addresses that are aligned differently."""

from __future__ import annotations

import torch

from turnwise.pretrained import CausalLM


@torch.no_grad()
def align(model: CausalLM) -> CausalLM:
    """The model with all its weights in memory that PyTorch has allocated, which is aligned to 64 bytes; tied ones stay
    tied.

    Tensors read from a safetensors file are views of the file, which begin wherever its header ends. The product with a
    single row, for one, is then summed up in another order than for a model that was built in this process, so that a
    run which loads a warm start would part from the one that made it. Nor shall weights change with the file.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model
