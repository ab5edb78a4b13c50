"""The export: a model as transformers and vLLM read it, each file written by one rank, and no rank with all of them.

Tensors are gathered one layer at a time, and a rank keeps those of its own files, in host memory. A layer is the
smallest part that transformers can name as it does in files: those of a mixture have a tensor per expert.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from turnwise.pretrained import CausalLM, ChatTokenizer

WEIGHTS, PART, INDEX = "model.safetensors", "model-{:05d}-of-{:05d}.safetensors", "model.safetensors.index.json"
LARGEST, SMALLEST = 5 * 10**9, 10**9
"""Bytes of a file: as many as spread the model evenly over ranks, and no more or fewer than these."""
LAYER = re.compile(r".*?\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Export:
    """What one rank writes of a model, in host memory.

    Example:
        Export({"model-00002-of-00002.safetensors": {"lm_head.weight": tensor}}, {}, ())
    """

    files: Mapping[str, Mapping[str, Tensor]]
    index: Mapping[str, Any]
    """Which file has which tensor, on the first rank, where there is more than one file."""
    settings: tuple[Any, ...]
    """What writes itself by `save_pretrained`, on the first rank: configurations, tokenizer."""

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in self.files.items():
            save_file(dict(tensors), folder / name, metadata={"format": "pt"})
        if self.index:
            (folder / INDEX).write_text(json.dumps(self.index, indent=2, sort_keys=True) + "\n")
        for part in self.settings:
            part.save_pretrained(folder)


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def stage_export(model: CausalLM, tokenizer: ChatTokenizer, dtype: torch.dtype | None) -> Export:
    """The export of a model; all ranks call this together. With a `dtype` its floating-point tensors are rounded to
    it."""
    rank, ranks = rank_and_size()
    weights = weights_of(model)
    total = sum(tensor.numel() * itemsize(tensor, dtype) for tensor in weights.values())
    room = max(min(-(-total // ranks), LARGEST), SMALLEST)
    places: dict[str, int] = {}
    kept: dict[int, dict[str, Tensor]] = {}
    file, filled = 0, 0
    for layer in layers_of(weights):
        for name, tensor in as_in_files(model, gathered(layer, dtype)).items():
            size = tensor.numel() * tensor.element_size()
            if filled and filled + size > room:
                file, filled = file + 1, 0
            filled += size
            places[name] = file
            if file % ranks == rank:
                kept.setdefault(file, {})[name] = tensor.to("cpu", copy=True).contiguous()
    names = [PART.format(number + 1, file + 1) for number in range(file + 1)] if file else [WEIGHTS]
    files = {names[number]: tensors for number, tensors in kept.items()}
    if rank:
        return Export(files, {}, ())
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[at] for name, at in places.items()}}
    return Export(files, index if file else {}, (*configurations(model, dtype), tokenizer))


def weights_of(model: CausalLM) -> dict[str, Tensor]:
    """The weights and buffers of a model that a file has, parameters themselves; of tied ones the one that the others
    are tied to."""
    weights = model.state_dict(keep_vars=True)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    by_identity: dict[int, list[str]] = {}
    for name, tensor in weights.items():
        by_identity.setdefault(id(tensor), []).append(name)
    return {
        name: weights[name]
        for names in by_identity.values()
        if (name := min(names, key=lambda name: (name in tied, names.index(name)))) not in ignored
    }


def layers_of(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The weights, one layer after the other; those outside of layers one by one."""

    def layer(name: str) -> str:
        found = LAYER.match(name)
        return found[0] if found else name

    for _, names in groupby(weights, layer):
        yield {name: weights[name] for name in names}


@torch.no_grad()
def gathered(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The whole tensors, rounded before they travel."""
    found = {}
    for name, tensor in tensors.items():
        given = tensor.detach()
        rounded = given.to(dtype) if dtype is not None and given.is_floating_point() else given
        found[name] = rounded.full_tensor() if hasattr(rounded, "full_tensor") else rounded
    return found


def as_in_files(model: CausalLM, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a layer as files have them, which transformers may have joined or renamed."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return reverted


def configurations(model: CausalLM, dtype: torch.dtype | None) -> tuple[Any, ...]:
    """The configurations of a model of that dtype, as they are now."""
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype or next(model.parameters()).dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    return (config, copy.deepcopy(model.generation_config)) if model.can_generate() else (config,)


def itemsize(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return (dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype).itemsize
