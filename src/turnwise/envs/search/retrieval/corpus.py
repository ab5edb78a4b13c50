"""A corpus: a file with a passage a line, in Search-R1's form, read where it is asked for."""

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
    """The file of a corpus: that of the catalogue, or a file of the user's own."""
    if name == FACTBOOK.name:
        return FACTBOOK.located() / PASSAGES
    if not Path(name).is_file():
        raise ValueError(
            f'no corpus at {name}; write "{FACTBOOK.name}", or a file with {{"contents": "\\"title\\"\\ntext"}} a line'
        )
    return Path(name).resolve()


class Corpus:
    """The passages of a file by number; a file of any size takes no memory, but for a number each.

    Example:
        Corpus(corpus_file("factbook"))[17] == {"id": "17", "contents": "\\"Algeria: Capital\\"\\nname: Algiers; ..."}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open(path, "rb")  # noqa: SIM115  open as long as the corpus is
        try:
            self.bytes = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ValueError(f"{path} holds no passages; write one a line") from None
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
        """All that is searched."""
        return (self[number]["contents"] for number in range(len(self)))

    def mark(self) -> str:
        """Changes with the file, so that what was made of another is not taken for its own."""
        state = self.path.stat()
        key = f"{self.path.resolve()}/{state.st_size}/{state.st_mtime_ns}"
        return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
