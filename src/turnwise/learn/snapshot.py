"""The snapshot: tensors by name in a folder, written by any number of ranks and read by any other number of them.

PyTorch's distributed checkpoint keeps it. A rank writes the parts it has, and reads those it needs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def write_snapshot(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, whole or spread over ranks; every rank calls this with the same names."""
    folder.mkdir(parents=True, exist_ok=True)
    with quietly():
        save(dict(tensors), checkpoint_id=folder, no_dist=not dist.is_initialized())


def names_in(folder: Path) -> frozenset[str]:
    """What a snapshot holds."""
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder} is not whole: it has no .metadata; resume from another checkpoint")
    return frozenset(FileSystemReader(folder).read_metadata().state_dict_metadata)


def read_snapshot(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole or spread over ranks, with what a snapshot holds under their names."""
    given: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    with quietly(), torch.no_grad():
        load(given, checkpoint_id=folder, no_dist=not dist.is_initialized())


@contextmanager
def quietly() -> Iterator[None]:
    """Without PyTorch's remarks that one process writes alone, or writes over what is there: both are meant."""
    log = logging.getLogger("torch.distributed.checkpoint")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\.distributed")
            yield
    finally:
        log.setLevel(level)
