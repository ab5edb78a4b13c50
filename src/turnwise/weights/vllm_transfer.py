"""The border to weight transfers into vLLM. One file per transport: vllm_file.py, vllm_native.py (nccl and ipc)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class TransferControl(Protocol):
    """The calls of vLLM's weight transfer, in the order of an update; generation is paused meanwhile."""

    async def init_transfer(self, info: dict[str, Any]) -> None: ...

    async def start_update(self) -> None: ...

    async def update(self, info: Any) -> None: ...

    async def finish_update(self, version: str) -> None: ...

    async def num_workers(self) -> int: ...


class WeightTransfer(Protocol):
    """A way for weights to reach the workers of one vLLM: first `prepare`, then a pause, then `send`."""

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        """The weights, brought as far as they can be while vLLM samples on."""
        ...

    async def send(self, weights: Mapping[str, Tensor], version: int, control: TransferControl) -> None:
        """Have all workers load the weights, and vLLM call them by this version."""
        ...

    async def close(self) -> None: ...


class OneAtATime:
    """A transfer that waits for its turn: the learner's GPU sends to one server after the other."""

    def __init__(self, transfer: WeightTransfer, turn: asyncio.Lock) -> None:
        self.transfer = transfer
        self.turn = turn

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        return await self.transfer.prepare(weights, version)

    async def send(self, weights: Mapping[str, Tensor], version: int, control: TransferControl) -> None:
        async with self.turn:
            await self.transfer.send(weights, version, control)

    async def close(self) -> None:
        await self.transfer.close()
