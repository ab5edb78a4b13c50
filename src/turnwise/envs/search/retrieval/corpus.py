"""A corpus: a file with one passage per line, in Search-R1's form. Passages are read on demand."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.data.factbook import FACTBOOK, PASSAGES


def corpus_file(name: str) -> Path:
    """The file of a corpus: one of the catalogue, or the user's file."""
    if name == FACTBOOK.name:
        return FACTBOOK.located() / PASSAGES
    if not Path(name).is_file():
        raise ValueError(
            f'there is no corpus at {name}; set corpus to "{FACTBOOK.name}", or to a file with one '
            f'{{"contents": "\\"title\\"\\ntext"}} per line'
        )
    return Path(name).resolve()


class Corpus:
    """The passages of a file by number. The file is memory-mapped; only one number per passage is in memory.

    Example:
        Corpus(corpus_file("factbook"))[17] == {"id": "17", "contents": "\\"Algeria: Capital\\"\\nname: Algiers; ..."}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open(path, "rb")  # noqa: SIM115  open as long as the corpus is
        try:
            self.bytes = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ValueError(f"{path} has no passages; write one per line") from None
        starts = [0]
        while (end := self.bytes.find(b"\n", starts[-1])) != -1:
            starts.append(end + 1)
        if starts[-1] < len(self.bytes):
            starts.append(len(self.bytes) + 1)
        self.starts = np.array(starts, np.int64)  # [passages + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        try:
            passage = json.loads(self.bytes[self.starts[number] : self.starts[number + 1] - 1])
        except ValueError as error:
            raise ValueError(f"{self.path}, line {number + 1}: not JSON ({error})") from None
        if not isinstance(passage, dict) or not isinstance(passage.get("contents"), str):
            raise ValueError(f"{self.path}, line {number + 1}: contents: needs to be a text")
        return passage

    def texts(self) -> Iterator[str]:
        """The texts of all passages."""
        return (self[number]["contents"] for number in range(len(self)))

    def mark(self) -> str:
        """A key that changes with the file, so that an index of another file is not used for this one."""
        state = self.path.stat()
        key = f"{self.path.resolve()}/{state.st_size}/{state.st_mtime_ns}"
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
