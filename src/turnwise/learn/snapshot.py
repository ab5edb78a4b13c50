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
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

Group = dist.ProcessGroup | None
"""Ranks that write together; None for all of them, or for a process that is alone."""

SHARDS = "*.safetensors"
CONTENTS = "contents.json"
"""Names and shapes of all tensors; written last. Shards do not say how many of them there are."""
PICKLED = ".metadata"
"""What turnwise wrote before."""


def stage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, of this rank's part where tensors are spread: training may go on and change the tensors
    while the copies are written."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        staged = stager.stage({name: tensor.detach() for name, tensor in tensors.items()})
    finally:
        stager.close()
    assert isinstance(staged, dict), "a stager without a thread stages at once"
    return staged


def write_snapshot(folder: Path, tensors: Mapping[str, Tensor], group: Group = None) -> None:
    """Write tensors, whole or spread over ranks; every rank calls this with the same names. What fails on one rank is
    raised on all of them."""
    try:
        with quietly():
            save(
                dict(tensors),
                storage_writer=Writer(folder, tensors),
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:  # which is no Exception
        raise first_failure(error) from None


class Writer(HuggingFaceStorageWriter):
    """Writes the tensors of a rank as one safetensors file, straight from memory. PyTorch's own writer makes the file
    in memory first, and holds the interpreter's lock meanwhile: nothing else in the process would go on."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.folder = folder
        self.shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank, before any rank writes: clear a snapshot that other ranks wrote."""
        for path in (self.folder / CONTENTS, self.folder / PICKLED, *self.folder.glob(SHARDS)):
            path.unlink(missing_ok=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if plan.items:
            tensors = {item.index.fqn: data_of(planner, item) for item in plan.items}
            assert len(tensors) == len(plan.items), "a rank has one part of a tensor"
            offsets = {item.index.fqn: {"saved_offsets": list(offsets_of(item))} for item in plan.items}
            about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            number = plan.storage_data["shard_index"]
            save_file(tensors, self.folder / f"shard-{number:05d}-model-00001-of-00001.safetensors", metadata=about)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])  # what `finish` would make an index of
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, once all ranks have written."""
        (self.folder / CONTENTS).write_text(json.dumps(self.shapes, indent=1) + "\n")


def data_of(planner: SavePlanner, item: WriteItem) -> Tensor:
    """The part that a rank has of a tensor."""
    part = planner.resolve_data(item)
    assert isinstance(part, Tensor)
    return part.contiguous()


def offsets_of(item: WriteItem) -> torch.Size:
    """Where in its tensor the part of a rank begins."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk.offsets


def first_failure(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank on which anything did."""
    return error.failures[min(error.failures)][0]


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
        raise ValueError(
            f"{folder} cannot be read ({one_line(first_failure(error))}); resume from another checkpoint"
        ) from None


@contextmanager
def quietly() -> Iterator[None]:
    """Without PyTorch's remarks that one process writes alone, which is meant. The filter of warnings stays: taking it
    back would undo what another thread has set meanwhile."""
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
    log = logging.getLogger("torch.distributed.checkpoint")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
