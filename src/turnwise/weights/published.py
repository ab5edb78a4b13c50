"""Published weights: one version of them in a file that any process of the machine can map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from turnwise.weights.manifest import Manifest, map_tensors


class Published(Mapping[str, Tensor]):
    """Weights by name. The file is mapped when the first is read; processes that read it at the same time share its
    pages. Writing to a tensor changes nothing for others. A file that is removed meanwhile stays until the last reader
    has closed it.

    Example:
        with Published(path) as weights:
            await engine.load(weights, weights.version)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path)
        self.version = self.manifest.version
        self.tensors: dict[str, Tensor] | None = None

    @classmethod
    def newest(cls, folder: Path) -> Published:
        """The newest version in a publisher's folder, mapped: its file may be removed at any time, and it stays
        readable."""
        while True:
            paths = list(folder.glob("*.safetensors"))
            if not paths:
                raise ValueError(f"nothing is published in {folder}")
            with suppress(FileNotFoundError):
                return cls(max(paths, key=lambda path: path.stat().st_mtime_ns)).__enter__()

    def __getitem__(self, name: str) -> Tensor:
        if self.tensors is None:
            self.tensors = map_tensors(self.manifest, self.path, shared=False)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.manifest.entries
        yield from self.manifest.aliases

    def __len__(self) -> int:
        return len(self.manifest.entries) + len(self.manifest.aliases)

    def __enter__(self) -> Published:
        with suppress(StopIteration):
            self[next(iter(self))]
        return self

    def __exit__(self, *_: object) -> None:
        self.tensors = None
