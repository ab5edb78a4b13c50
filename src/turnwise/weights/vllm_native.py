"""Weights to vLLM by vLLM's own transfers between GPUs: nccl and ipc.

vLLM's senders run in every process of a learner. Each iterates the same source of whole tensors, which the processes
gather together; the first process sends them, and tells vLLM to receive them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.weights.parted import PartedWeights
from turnwise.weights.share import WeightShare
from turnwise.weights.stages import stage
from turnwise.weights.tied import tied_names
from turnwise.weights.vllm_control import ControlAddress, ControlCaller, ControlServer
from turnwise.weights.vllm_transfer import TransferControl


@dataclass(frozen=True, slots=True)
class Route:
    """The way from the processes of a learner to the workers of one vLLM.

    Example:
        Route("nccl", torch.bfloat16, num_workers=4, host="10.0.0.7", port=29500, control=address)
    """

    backend: str
    dtype: torch.dtype
    num_workers: int
    host: str
    port: int
    """Where the sender and the workers meet, with nccl."""
    control: ControlAddress


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor that will come, as vLLM's senders announce it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WholeTensors:
    """What vLLM calls a `WeightSource`: announces tensors without gathering any, and yields them one after the other.
    All processes of a learner must iterate it together."""

    def __init__(self, share: WeightShare, dtype: torch.dtype) -> None:
        self.share = share
        self.dtype = dtype

    def metadata(self) -> list[TensorMeta]:
        shapes = self.share.outline.served_in(self.dtype).shapes
        return [TensorMeta(name, dtype, shape) for name, (dtype, shape) in shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.share.whole(self.dtype)


class NativeSender:
    """The end of a route in one process of a learner."""

    def __init__(self, route: Route, rank: int, share: WeightShare) -> None:
        """Connects. All processes must do so together, and the workers of vLLM meet them."""
        self.route = route
        self.source = WholeTensors(share, route.dtype)
        self.caller = ControlCaller(route.control) if rank == 0 else None
        self.trainer = trainer_of(route, rank, self.caller, self.source)

    def send(self, share: WeightShare, version: int) -> None:
        self.source.share = share
        if self.caller is not None:
            self.caller.version = str(version)
        self.trainer.send_weights()

    def close(self) -> None:
        self.trainer.shutdown()
        if self.caller is not None:
            self.caller.close()


def trainer_of(route: Route, rank: int, client: Any, source: Any) -> Any:
    """vLLM's sender, once all workers have met it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    if route.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info: Any = IPCTrainerInitInfo(rank=rank, packed=True)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(route.host, route.port, 1 + route.num_workers, rank=rank)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


class NativeTransfer:
    """Weights by vLLM's own backends: "nccl" to other GPUs, "ipc" to workers on the GPUs of the learner."""

    def __init__(self, backend: str, dtype: torch.dtype) -> None:
        self.backend = backend
        self.dtype = dtype
        self.server: ControlServer | None = None
        self.route: Route | None = None
        self.sender: NativeSender | None = None
        """Of a learner in this process."""

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        """As they are: workers receive tensors into the weights that they compute with."""
        return weights

    async def send(self, weights: Mapping[str, Tensor], version: int, control: TransferControl) -> None:
        if self.route is None:
            self.route = await self.open_route(control)
        with stage("transfer"):
            if isinstance(weights, PartedWeights):
                await asyncio.to_thread(weights.ask, "send", self.route, version)
            else:
                await asyncio.to_thread(self.send_from_here, self.route, weights, version)

    async def open_route(self, control: TransferControl) -> Route:
        self.server = ControlServer(control, asyncio.get_running_loop())
        host, port = free_address()
        num_workers = await control.num_workers()
        return Route(self.backend, self.dtype, num_workers, host, port, self.server.address)

    def send_from_here(self, route: Route, weights: Mapping[str, Tensor], version: int) -> None:
        """Send from the one process of a learner."""
        tied = tied_names(weights)
        share = WeightShare({name: tensor for name, tensor in weights.items() if name not in tied})
        if self.sender is None:
            self.sender = NativeSender(route, 0, share)
        self.sender.send(share, version)

    async def close(self) -> None:
        if self.sender is not None:
            await asyncio.to_thread(self.sender.close)
        if self.server is not None:
            self.server.close()
        self.server = self.route = self.sender = None


def free_address() -> tuple[str, int]:
    """(address of this machine, a free port), for other machines to connect to."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return socket.gethostbyname(socket.gethostname()), int(probe.getsockname()[1])
