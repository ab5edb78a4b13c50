"""The manifest: what a file of published weights holds and where, as the header of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
"""Tensors begin at multiples of so many bytes, so that reading them where they lie is as quick as reading a copy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies, in bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of one version by name; names of one tensor, as of a tied head, have one place.

    Example:
        Manifest(3, {"embed.weight": Entry(torch.float32, (64, 8), 512, 2560)}, {"head.weight": "embed.weight"})
    """

    version: int
    entries: Mapping[str, Entry]
    aliases: Mapping[str, str]
    """Other names of tensors that are there already."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], version: int) -> Manifest:
        """The places of these tensors in a file of their own."""
        seen: dict[tuple[object, ...], str] = {}
        aliases, sizes = {}, {}
        for name, tensor in tensors.items():
            if tensor.dtype not in CODES:
                raise ValueError(f"{name} is of {tensor.dtype}, which weights cannot be published in; convert it")
            own = (tensor.data_ptr() or name, tensor.dtype, tensor.shape, tensor.stride())
            if (first := seen.setdefault(own, name)) != name:
                aliases[name] = first
            else:
                sizes[name] = tensor.numel() * tensor.element_size()
        # Wide elements first: the format has no holes, and each must begin where its dtype may.
        names = sorted(sizes, key=lambda name: -tensors[name].element_size())
        entries, place = {}, 0
        for name in names:
            entries[name] = Entry(tensors[name].dtype, tuple(tensors[name].shape), place, place + sizes[name])
            place += sizes[name]
        offset = len(cls(version, entries, aliases).head)
        moved = {n: Entry(e.dtype, e.shape, e.start + offset, e.end + offset) for n, e in entries.items()}
        return cls(version, moved, aliases)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return max((entry.end for entry in self.entries.values()), default=len(self.head))

    @property
    def head(self) -> bytes:
        """The beginning of the file, up to the first tensor."""
        base = min((entry.start for entry in self.entries.values()), default=0)
        told: dict[str, object] = {
            "__metadata__": {"version": str(self.version), "aliases": json.dumps(dict(self.aliases))}
        }
        for name, entry in self.entries.items():
            offsets = [entry.start - base, entry.end - base]
            told[name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        text = json.dumps(told).encode()
        text += b" " * (-(len(text) + 8) % ALIGNED)
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """What is in a file that was published."""
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            told = json.loads(file.read(size))
        about = told.pop("__metadata__", {})
        if "version" not in about:
            raise ValueError(f"{path} says no version of its weights; read it with safetensors instead")
        entries = {
            name: Entry(
                DTYPES[entry["dtype"]], tuple(entry["shape"]), *(8 + size + place for place in entry["data_offsets"])
            )
            for name, entry in told.items()
        }
        return cls(int(about["version"]), entries, json.loads(about["aliases"]))


def places(manifest: Manifest, path: Path, *, shared: bool) -> dict[str, Tensor]:
    """The tensors of a file by every name they have, where they lie: nothing is copied. What is written to them goes to
    the file where it is shared, and stays in this process otherwise."""
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=shared, nbytes=manifest.size)
    flat = torch.tensor([], dtype=torch.uint8).set_(storage)
    found = {
        name: flat[entry.start : entry.end].view(entry.dtype).view(entry.shape)
        for name, entry in manifest.entries.items()
    }
    return found | {name: found[first] for name, first in manifest.aliases.items()}
