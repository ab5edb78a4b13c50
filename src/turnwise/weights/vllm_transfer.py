"""How new weights reach vLLM: through a file in memory or on a disk, or by vLLM's own transfer between GPUs."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

BACKEND = "turnwise_file"
"""What vLLM's configuration calls the transfer through a file."""
MEMORY = Path("/dev/shm")


class Control(Protocol):
    """The calls of vLLM's weight transfer, in the order of an update; generation is paused meanwhile."""

    async def init_transfer(self, info: dict[str, Any]) -> None: ...

    async def start_update(self) -> None: ...

    async def update(self, info: Any) -> None: ...

    async def finish_update(self, version: str) -> None: ...

    async def num_workers(self) -> int: ...


class Transfer(Protocol):
    """A way for weights to reach the workers of one vLLM."""

    async def send(self, weights: Mapping[str, Tensor], version: int, control: Control) -> None:
        """Have all workers load the weights, and vLLM call them by this version."""
        ...

    async def close(self) -> None: ...


class FileTransfer:
    """Weights through one safetensors file that is gone after the load.

    Example:
        FileTransfer(torch.float32, Path("/dev/shm"))
    """

    def __init__(self, dtype: torch.dtype, folder: Path | None = None) -> None:
        """`dtype` is what vLLM computes in; the folder must be one that its workers can see."""
        self.dtype = dtype
        self.folder = folder or (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))

    async def send(self, weights: Mapping[str, Tensor], version: int, control: Control) -> None:
        with self.room(version) as path:
            await asyncio.to_thread(self.write, weights, path)
            await control.start_update()
            await control.update({"path": str(path)})
            await control.finish_update(str(version))

    @contextmanager
    def room(self, version: int) -> Iterator[Path]:
        """A file of its own, which does not outlive the load."""
        handle, name = tempfile.mkstemp(prefix=f"turnwise-{version}-", suffix=".safetensors", dir=self.folder)
        os.close(handle)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def write(self, weights: Mapping[str, Tensor], path: Path) -> None:
        from safetensors.torch import save_file

        save_file(as_served(weights, self.dtype), path)

    async def close(self) -> None:
        return None


class NativeTransfer:
    """Weights by vLLM's own backends: "nccl" to other GPUs, "ipc" to workers on the GPU of the learner."""

    def __init__(self, backend: str, dtype: torch.dtype) -> None:
        self.backend = backend
        self.dtype = dtype
        self.source: Any = None
        self.sender: Any = None
        self.client: InThread | None = None

    async def send(self, weights: Mapping[str, Tensor], version: int, control: Control) -> None:
        tensors = as_served(weights, self.dtype)
        if self.client is None:
            num_workers = await control.num_workers()
            self.client = InThread(control, asyncio.get_running_loop())
            self.source = source_of(tensors)
            self.sender = await asyncio.to_thread(self.connect, self.client, num_workers)
        self.source.tensors = tensors
        self.client.version = str(version)
        await asyncio.to_thread(self.sender.send_weights)

    def connect(self, client: InThread, num_workers: int) -> Any:
        """vLLM's sender, once all workers have met it."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info: Any = IPCTrainerInitInfo(rank=0, packed=True)
        else:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            address, port = meeting_point()
            info = NCCLTrainerInitInfo(address, port, 1 + num_workers, rank=0)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self.source)

    async def close(self) -> None:
        if self.sender is not None:
            await asyncio.to_thread(self.sender.shutdown)
        self.client = self.sender = None


class InThread:
    """A `Control` as vLLM's senders want it: plain calls from a thread, made in the event loop."""

    def __init__(self, control: Control, loop: asyncio.AbstractEventLoop) -> None:
        self.control = control
        self.loop = loop
        self.version = ""
        """What the weights under way are called: the senders do not know."""

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


def as_served(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Each tensor once, under its first name, as vLLM holds it: a tied head comes with the embedding."""
    seen: set[tuple[int, torch.Size]] = set()
    found = {}
    for name, tensor in weights.items():
        if (own := (tensor.data_ptr(), tensor.shape)) not in seen:
            seen.add(own)
            found[name] = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
    return found


def source_of(tensors: Mapping[str, Tensor]) -> Any:
    """A mapping as vLLM's senders read it."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def __init__(self) -> None:
            self.tensors = tensors

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(self.tensors.items())

    return Source()


def meeting_point() -> tuple[str, int]:
    """An address of this machine that others reach, and a port that is free."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return socket.gethostbyname(socket.gethostname()), int(probe.getsockname()[1])
