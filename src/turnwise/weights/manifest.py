"""The manifest: names, shapes and offsets of a file of published weights, as the header of a safetensors file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.weights.tied import tied_names

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
ALIGNED = 64
"""Tensors begin at multiples of so many bytes, so that kernels read mapped memory as fast as a copy."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The bytes of one tensor, counted from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Outline:
    """What tensors there are, wherever they are.

    Example:
        Outline({"embed.weight": (torch.float32, (64, 8))}, {"head.weight": "embed.weight"})
    """

    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """By name: dtype and shape of each tensor, once."""
    aliases: Mapping[str, str]
    """Each further name of a tensor, and its first name."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Outline:
        aliases = tied_names(tensors)
        return cls({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items() if n not in aliases}, aliases)

    def served_in(self, dtype: torch.dtype | None) -> Outline:
        """The same tensors with floating-point numbers in a dtype; as they are where it is None."""
        if dtype is None:
            return self
        shapes = {n: (dtype if own.is_floating_point else own, shape) for n, (own, shape) in self.shapes.items()}
        return Outline(shapes, self.aliases)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of one version by name; tied names share one entry.

    Example:
        Manifest(3, {"embed.weight": TensorEntry(torch.float32, (64, 8), 512, 2560)}, {"head.weight": "embed.weight"})
    """

    version: int
    entries: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    """name -> the name in `entries` of the tensor that it is tied to"""

    @classmethod
    def of(cls, outline: Outline, version: int) -> Manifest:
        """The manifest of a file with such tensors."""
        for name, (dtype, _) in outline.shapes.items():
            if dtype not in CODES:
                raise ValueError(f"{name} is of {dtype}, which weights cannot be published in; convert it")
        # Wide elements first: the format has no gaps, and each tensor must begin where its dtype may.
        entries, start = {}, 0
        for name, (dtype, shape) in sorted(outline.shapes.items(), key=lambda item: -item[1][0].itemsize):
            end = start + math.prod(shape) * dtype.itemsize
            entries[name] = TensorEntry(dtype, shape, start, end)
            start = end
        offset = len(cls(version, entries, outline.aliases).head)
        shifted = {n: TensorEntry(e.dtype, e.shape, e.start + offset, e.end + offset) for n, e in entries.items()}
        return cls(version, shifted, outline.aliases)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return max((entry.end for entry in self.entries.values()), default=len(self.head))

    @property
    def head(self) -> bytes:
        """The beginning of the file, up to the first tensor."""
        base = min((entry.start for entry in self.entries.values()), default=0)
        header: dict[str, object] = {
            "__metadata__": {"version": str(self.version), "aliases": json.dumps(dict(self.aliases))}
        }
        for name, entry in self.entries.items():
            offsets = [entry.start - base, entry.end - base]
            header[name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % ALIGNED)
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest of a published file."""
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        metadata = header.pop("__metadata__", {})
        if "version" not in metadata:
            raise ValueError(f"{path} says no version of its weights; read it with safetensors instead")
        entries = {
            name: TensorEntry(
                DTYPES[entry["dtype"]], tuple(entry["shape"]), *(8 + size + offset for offset in entry["data_offsets"])
            )
            for name, entry in header.items()
        }
        return cls(int(metadata["version"]), entries, json.loads(metadata["aliases"]))


def map_tensors(manifest: Manifest, path: Path, *, shared: bool) -> dict[str, Tensor]:
    """The tensors of a file by every name they have, in mapped memory: nothing is copied. With `shared`, writing to a
    tensor writes to the file; otherwise it stays in this process."""
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=shared, nbytes=manifest.size)
    flat = torch.tensor([], dtype=torch.uint8).set_(storage)
    tensors = {
        name: flat[entry.start : entry.end].view(entry.dtype).view(entry.shape)
        for name, entry in manifest.entries.items()
    }
    return tensors | {name: tensors[first] for name, first in manifest.aliases.items()}
