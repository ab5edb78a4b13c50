"""Published weights: one version of them in a file that any process of the machine reads where it lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from turnwise.weights.manifest import Manifest, places


class Published(Mapping[str, Tensor]):
    """Weights by name. The file is mapped when the first is read, and read into memory by nobody: processes that read
    it at the same time share its pages. What is written to a tensor stays in this process. A file that is removed
    meanwhile stays until the last reader has closed it.

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
        """The newest version in a publisher's folder, mapped: it may lose its name at any time, and stays readable."""
        while True:
            found = list(folder.glob("*.safetensors"))
            if not found:
                raise ValueError(f"nothing is published in {folder}")
            with suppress(FileNotFoundError):
                return cls(max(found, key=lambda path: path.stat().st_mtime_ns)).__enter__()

    def __getitem__(self, name: str) -> Tensor:
        if self.tensors is None:
            self.tensors = places(self.manifest, self.path, shared=False)
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
