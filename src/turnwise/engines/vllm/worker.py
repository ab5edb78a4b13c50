"""Code that runs inside vLLM's workers: a backend of vLLM's weight transfer that reads a safetensors file.

A worker imports this module because its `worker_extension_cls` names `Extension`; importing it registers the backend,
which `weight_transfer_config` then names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from turnwise.weights.vllm_file import BACKEND


@dataclass
class FileInit(WeightTransferInitInfo):
    """Empty: a file needs no connection."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """The file with the weights."""

    path: str


class FileEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Reads all weights of an update from one file, in memory or on a disk, that every worker can see."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        return None

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a file. vLLM's method waits for an accelerator afterwards, and fails where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        self.model.load_weights(tensors_in(update_info.path))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_again(self.model)

    def shutdown(self) -> None:
        return None


def tensors_in(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118, it is no mapping
            yield name, file.get_tensor(name)


def pack_again(model: torch.nn.Module) -> None:
    """Pack the weights of linear layers and experts again for the CPU's kernels.

    On a CPU `cpu_linear` holds a packed copy. A layer that is loaded packs its weight again; a head that is tied to the
    embedding is never loaded, and would sample with the weights of the start for ever. Experts of a mixture are packed
    when their kernel is made, and not when they are loaded again: the kernel would read plain weights as packed ones.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if isinstance(experts := getattr(kernel, "fused_experts", None), CPUUnquantizedExperts):
            experts.process_weights_after_loading(module)
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


MODEL_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""What copies of one model have in common, by the names of Hugging Face's configs."""


class Extension:
    """A worker that is given its name imports this module, and has its methods."""

    vllm_config: Any

    def turnwise_model(self) -> dict[str, Any]:
        """Which model the worker has; `MODEL_METHOD` is its name."""
        config = self.vllm_config.model_config.hf_text_config
        return {key: getattr(config, key, None) for key in MODEL_KEYS}


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
