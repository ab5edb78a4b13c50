"""What a folder of a model may hold: tensors and settings. Whatever would run code is refused before it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def check_contents(folder: Path) -> None:
    """ValueError where loading the folder would run somebody's code: a pickle, or a kernel of a hub. Code that lies in
    the folder itself (`auto_map`) is ignored by transformers, which is never told to trust it."""
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise ValueError(f"{folder} has its weights as a pickle, which is not read; save them as safetensors")
    try:
        settings = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return  # for transformers to complain of
    for key, value in entries(settings):
        if key.endswith("_implementation") and isinstance(value, str) and "/" in value:
            raise ValueError(f"{folder / 'config.json'} names code to fetch and run ({key} = {value}); remove it")


def entries(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, however deep."""
    nested = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in nested:
        yield str(key), value
        yield from entries(value)
