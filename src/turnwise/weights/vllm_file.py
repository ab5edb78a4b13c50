"""Weights to vLLM through a file in memory or on a disk."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from turnwise.weights.published import Published
from turnwise.weights.shared_memory import shared_memory_folder
from turnwise.weights.vllm_transfer import TransferControl, as_served

BACKEND = "turnwise_file"
"""The name of this transfer in vLLM's configuration."""


class FileTransfer:
    """Weights through one safetensors file that is removed after the load.

    Example:
        FileTransfer(torch.float32, Path("/dev/shm"))
    """

    def __init__(self, dtype: torch.dtype, folder: Path | None = None) -> None:
        """`dtype` is what vLLM computes in; the folder must be one that its workers can see."""
        self.dtype = dtype
        self.folder = folder or shared_memory_folder()

    async def send(self, weights: Mapping[str, Tensor], version: int, control: TransferControl) -> None:
        if isinstance(weights, Published):  # a file that others read too
            await self.load(weights.path, version, control)
            return
        with self.temporary_file(version) as path:
            await asyncio.to_thread(self.write, weights, path)
            await self.load(path, version, control)

    async def load(self, path: Path, version: int, control: TransferControl) -> None:
        await control.start_update()
        await control.update({"path": str(path)})
        await control.finish_update(str(version))

    @contextmanager
    def temporary_file(self, version: int) -> Iterator[Path]:
        """A new file, removed at the end of the load."""
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
