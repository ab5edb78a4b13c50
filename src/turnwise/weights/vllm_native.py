"""Weights to vLLM by vLLM's own transfers between GPUs: nccl and ipc."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from turnwise.weights.vllm_transfer import TransferControl, as_served


class NativeTransfer:
    """Weights by vLLM's own backends: "nccl" to other GPUs, "ipc" to workers on the GPU of the learner."""

    def __init__(self, backend: str, dtype: torch.dtype) -> None:
        self.backend = backend
        self.dtype = dtype
        self.source: Any = None
        self.sender: Any = None
        self.client: ThreadControl | None = None

    async def send(self, weights: Mapping[str, Tensor], version: int, control: TransferControl) -> None:
        tensors = as_served(weights, self.dtype)
        if self.client is None:
            num_workers = await control.num_workers()
            self.client = ThreadControl(control, asyncio.get_running_loop())
            self.source = make_source(tensors)
            self.sender = await asyncio.to_thread(self.connect, self.client, num_workers)
        self.source.tensors = tensors
        self.client.version = str(version)
        await asyncio.to_thread(self.sender.send_weights)

    def connect(self, client: ThreadControl, num_workers: int) -> Any:
        """vLLM's sender, once all workers have met it."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info: Any = IPCTrainerInitInfo(rank=0, packed=True)
        else:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            address, port = free_address()
            info = NCCLTrainerInitInfo(address, port, 1 + num_workers, rank=0)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self.source)

    async def close(self) -> None:
        if self.sender is not None:
            await asyncio.to_thread(self.sender.shutdown)
        self.client = self.sender = None


class ThreadControl:
    """A `TransferControl` as vLLM's senders want it: blocking calls from a thread, which run in the event loop."""

    def __init__(self, control: TransferControl, loop: asyncio.AbstractEventLoop) -> None:
        self.control = control
        self.loop = loop
        self.version = ""
        """The version that is being sent: vLLM's senders do not know it."""

    def wait(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.wait(self.control.init_transfer(init_info))

    def start_weight_update(self) -> None:
        self.wait(self.control.start_update())

    def update_weights(self, update_info: Any) -> None:
        self.wait(self.control.update(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.wait(self.control.finish_update(weight_version or self.version))


def make_source(tensors: Mapping[str, Tensor]) -> Any:
    """A `WeightSource` of vLLM over a mapping."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def __init__(self) -> None:
            self.tensors = tensors

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(self.tensors.items())

    return Source()


def free_address() -> tuple[str, int]:
    """(address of this machine, a free port), for other machines to connect to."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return socket.gethostbyname(socket.gethostname()), int(probe.getsockname()[1])
