"""The snapshot: tensors by name in a folder, written by any number of ranks and read by any other number of them.

PyTorch's distributed checkpoint keeps it, as safetensors: a rank writes the parts it has, and reads those it needs. Its
usual format is not used because it has a pickle in it, and a run folder may come from anybody.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

SHARDS = "*.safetensors"
CONTENTS = "contents.json"
"""Names and shapes of all tensors; written last. Shards do not say how many of them there are."""
PICKLED = ".metadata"
"""What turnwise wrote before."""


def write_snapshot(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, whole or spread over ranks; every rank calls this with the same names."""
    folder.mkdir(parents=True, exist_ok=True)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first:
        for path in (folder / CONTENTS, folder / PICKLED, *folder.glob(SHARDS)):
            path.unlink(missing_ok=True)  # of a snapshot that other ranks wrote
    if dist.is_initialized():
        dist.barrier()
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with quietly():
        save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    if is_first:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        (folder / CONTENTS).write_text(json.dumps(shapes, indent=1) + "\n")


def names_in(folder: Path) -> frozenset[str]:
    """What a snapshot holds; ValueError where that is not all there."""
    if (folder / PICKLED).is_file():
        raise ValueError(
            f"{folder} was written by an earlier turnwise, as a pickle, which is not read; go on from its checkpoint "
            f"as a model: model.path={folder.parent} sft.updates=0 in a new run"
        )
    try:
        shapes = json.loads((folder / CONTENTS).read_text())
        found = HuggingFaceStorageReader(str(folder)).read_metadata()
        missing = [name for name, shape in shapes.items() if not is_whole(found, name, shape)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        raise ValueError(f"{folder} is not whole ({one_line(error)}); resume from another checkpoint") from None
    if missing:
        raise ValueError(f"{folder} is not whole: parts of {missing[0]} are missing; resume from another checkpoint")
    return frozenset(shapes)


def is_whole(found: Metadata, name: str, shape: list[int]) -> bool:
    """Whether the parts of a tensor come to all of it: ranks do not write the same element twice."""
    entry = found.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata) or list(entry.size) != shape:
        return False
    return sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel()


def one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def read_snapshot(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole or spread over ranks, with what a snapshot holds under their names."""
    given: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with quietly(), torch.no_grad():
            load(given, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # which is no Exception
        first = next(iter(error.failures.values()))[0]
        raise ValueError(f"{folder} cannot be read ({one_line(first)}); resume from another checkpoint") from None


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
