"""What runs inside vLLM's workers: weights from a safetensors file, as a backend of vLLM's own weight transfer.

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
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from turnwise.weights.vllm_transfer import BACKEND


@dataclass
class FileInit(WeightTransferInitInfo):
    """There is nothing to agree on before the first file."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """Where the weights are."""

    path: str


class FileEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Reads all weights of an update from one file that every worker can see, in memory or on a disk."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        return None

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a file. vLLM's own waits for an accelerator afterwards, and fails where there is none."""
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
    """Pack the weights of linear layers anew for the CPU's kernels.

    On a CPU `cpu_linear` holds a packed copy. A layer that is loaded packs its own; a head that is tied to the
    embedding is never loaded, and would go on sampling with the weights of the start.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class Extension:
    """Nothing by itself: naming it has a worker import this module."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
