"""Weights to vLLM through a file in memory or on a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from turnwise.weights.published import Published
from turnwise.weights.publisher import Publisher
from turnwise.weights.stages import stage
from turnwise.weights.vllm_transfer import TransferControl

BACKEND = "turnwise_file"
"""The name of this transfer in vLLM's configuration."""
MODEL_METHOD = "turnwise_model"
"""What workers with our extension are asked for their model by."""


class FileTransfer:
    """Weights through one safetensors file that is removed after the load. Each tensor is there once, under its first
    name: a tied head comes with the embedding. Where several processes share a learner, each writes its part.

    Example:
        FileTransfer(torch.float32, Path("/dev/shm"))
    """

    def __init__(self, dtype: torch.dtype, folder: Path | None = None) -> None:
        """`dtype` is what vLLM computes in; the folder must be one that its workers can see."""
        self.dtype = dtype
        self.folder = folder
        self.publisher: Publisher | None = None

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        return await asyncio.to_thread(self.write, weights, version)

    def write(self, weights: Mapping[str, Tensor], version: int) -> Published:
        """The file of these weights: one that is there already, or a new one."""
        if isinstance(weights, Published):
            return weights
        if self.publisher is None:
            self.publisher = Publisher(self.folder, self.dtype)
        return self.publisher.publish(weights, version)

    async def send(self, weights: Mapping[str, Tensor], version: int, control: TransferControl) -> None:
        published = await asyncio.to_thread(self.write, weights, version)
        try:
            with stage("transfer"):
                await control.start_update()
                await control.update({"path": str(published.path)})
                await control.finish_update(str(version))
        finally:
            if self.publisher is not None and self.publisher.newest is published:
                self.publisher.withdraw()

    async def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None
